"""The return of uniformly random actions: what a trained team is compared with.

    python examples/random_policy.py jaxmarl/MPE_simple_spread_v3 1000

For environments without action masks, whose episodes end.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp

import marl
from marl.envs import spaces


def play(env, key):
    """Returns [] by agent id of one episode."""

    def running(loop):
        return ~loop[-1]

    def step(loop):
        key, state, returns, _ = loop
        key, key_act, key_env = jax.random.split(key, 3)
        keys = jax.random.split(key_act, len(env.agents))
        action = {
            agent: spaces.sample(k, env.action_spaces[agent])
            for agent, k in zip(env.agents, keys, strict=True)
        }
        timestep, state = env.step(key_env, state, action)
        returns = {agent: returns[agent] + timestep.reward[agent] for agent in returns}
        return key, state, returns, timestep.episode_over

    key_reset, key_steps = jax.random.split(key)
    _, state = env.reset(key_reset)
    nothing = {agent: jnp.zeros(()) for agent in env.agents}
    return jax.lax.while_loop(running, step, (key_steps, state, nothing, jnp.array(False)))[2]


def main(env_id="jaxmarl/MPE_simple_spread_v3", episodes=1000):
    env = marl.make(env_id)
    keys = jax.random.split(jax.random.key(0), int(episodes))
    returns = jax.jit(jax.vmap(partial(play, env)))(keys)
    for agent in env.agents:
        print(f"  {agent:20} {jnp.mean(returns[agent]):8.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
