"""Returns and advantages along one time axis. Trailing axes are carried along."""

import jax
import jax.numpy as jnp


def gae(
    reward: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    gamma: jax.Array,
    gae_lambda: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, equation 16).

        delta_t = r_t + gamma (1 - terminated_t) V(next_t) - V(obs_t)
        A_t = delta_t + gamma lambda (1 - terminated_t)(1 - truncated_t) A_{t+1}

    A truncated step bootstraps from the state it really led to, and its recursion is cut; so is the
    end of the rollout.

    Args:
      reward, value, next_value: [T, ...] float; `next_value` of the state the transition led to.
      terminated, truncated: [T, ...] bool.
      gamma, gae_lambda: [] discount and trace decay.

    Returns:
      Advantages and value targets, each [T, ...].
    """
    # `where`, not products: what lies behind an end is never read, not even if it is NaN
    bootstrap = jnp.where(terminated, 0.0, gamma * next_value)
    delta = reward + bootstrap - value
    cut = terminated | truncated

    def step(advantage, inputs):
        delta_t, cut_t = inputs
        advantage = delta_t + jnp.where(cut_t, 0.0, gamma * gae_lambda * advantage)
        return advantage, advantage

    _, advantage = jax.lax.scan(step, jnp.zeros_like(delta[0]), (delta, cut), reverse=True)
    return advantage, advantage + value
