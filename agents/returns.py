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


def q_lambda(
    reward: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    gamma: jax.Array,
    trace_decay: jax.Array,
) -> jax.Array:
    """Lambda returns of the greedy policy (Gallici et al. 2024, arXiv:2407.04811).

        G_t = r_t + gamma (1 - terminated_t) [lambda G_{t+1} + (1 - lambda) max_a Q(next_t, a)]

    Where t is truncated or the last step, the bracket is max_a Q(next_t, a) alone.

    Args:
      reward, next_value: [T, ...] float; `next_value` is the largest Q of the state the transition
        led to.
      terminated, truncated: [T, ...] bool.
      gamma, trace_decay: [] discount and lambda.

    Returns:
      Targets [T, ...] of the actions taken.
    """

    def step(following, inputs):
        reward_t, value_t, terminated_t, truncated_t = inputs
        mixed = trace_decay * following + (1.0 - trace_decay) * value_t
        mixed = jnp.where(truncated_t, value_t, mixed)
        following = reward_t + jnp.where(terminated_t, 0.0, gamma * mixed)
        return following, following

    steps = (reward, next_value, terminated, truncated)
    _, target = jax.lax.scan(step, next_value[-1], steps, reverse=True)
    return target


def n_step(
    reward: jax.Array, terminated: jax.Array, truncated: jax.Array, gamma: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The T-step return of the first of T steps, up to its bootstrap (Sutton 1988).

        G = sum_{k <= m} gamma^k r_k + discount V(next_m)

    The last step m that counts is the first that is terminated or truncated, else T - 1; `discount`
    is 0 where it is terminated, else gamma^(m + 1).

    Args:
      reward: [T, ...] float.
      terminated, truncated: [T, ...] bool.
      gamma: [] discount.

    Returns:
      The sum of rewards, `discount`, and m (int32), each [...].
    """
    ends = (terminated | truncated).astype(jnp.int32)
    counts = jnp.cumsum(ends, 0) == ends  # no step before this one ended the episode
    powers = jnp.power(gamma, jnp.arange(reward.shape[0] + 1, dtype=reward.dtype))
    discounts = jnp.reshape(powers[:-1], (-1, *[1] * (reward.ndim - 1)))
    total = jnp.sum(jnp.where(counts, discounts * reward, 0.0), 0)
    last = jnp.sum(counts, 0, dtype=jnp.int32) - 1
    discount = jnp.where(jnp.any(counts & terminated, 0), 0.0, powers[last + 1])
    return total, discount, last


def n_steps(
    reward: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    gamma: jax.Array,
    length: int,
) -> jax.Array:
    """`n_step` returns of each of the first `length` of T steps, with n = T - length + 1.

    Args:
      reward, next_value: [T, ...] float; `next_value` of the state the transition led to.
      terminated, truncated: [T, ...] bool.
      gamma: [] discount.
      length: how many returns.

    Returns:
      Targets [length, ...] of the actions taken.
    """

    def ahead(x: jax.Array) -> jax.Array:  # [n, length, ...]
        return jnp.stack([x[k : k + length] for k in range(x.shape[0] - length + 1)])

    total, discount, last = n_step(ahead(reward), ahead(terminated), ahead(truncated), gamma)
    value = jnp.take_along_axis(ahead(next_value), last[None], 0)[0]
    # `where`: what lies behind an end is never read, not even if it is NaN
    return total + jnp.where(discount > 0, discount * value, 0.0)
