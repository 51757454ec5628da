"""What talking is worth in MPE simple_speaker_listener: a listener that knows where to go, and one
that does not.

    python examples/speaker_listener_bounds.py 2000

Both steer by hand, which is not quite the best that can be done. One is told its landmark, as by a
speaker that is understood; the other heads for the middle of all three, the best guess in silence.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp

import marl

DIRECTIONS = ((0.0, 0.0), (-1.0, 0.0), (1.0, 0.0), (0.0, -1.0), (0.0, 1.0))  # of the five moves
STEP, DAMPING, FORCE = 0.1, 0.25, 5.0  # seconds; per step; of a move


def steer(listener, target):
    """The move [] that comes nearest to the target; listener is its observation [11]."""
    velocity = listener[:2] * (1 - DAMPING) + FORCE * STEP * jnp.array(DIRECTIONS)
    coasted = 0.6 * STEP / DAMPING * velocity  # most of the way that it still goes by itself
    return jnp.argmin(jnp.sum(jnp.square(target - coasted), -1)).astype(jnp.int32)


def play(env, told, key):
    """The return [] of one episode."""

    def step(carry, key):
        obs, state = carry
        goal = jnp.argmax(obs["speaker_0"])  # its landmark's colour is all a speaker sees
        landmarks = obs["listener_0"][2:8].reshape(3, 2)
        target = landmarks[goal] if told else jnp.mean(landmarks, 0)
        action = {
            "speaker_0": goal.astype(jnp.int32),
            "listener_0": steer(obs["listener_0"], target),
        }
        timestep, state = env.step(key, state, action)
        return (timestep.obs, state), timestep.reward["listener_0"]

    key_reset, key_steps = jax.random.split(key)
    return jnp.sum(jax.lax.scan(step, env.reset(key_reset), jax.random.split(key_steps, 26))[1])


def main(episodes=1000):
    env = marl.make("jaxmarl/MPE_simple_speaker_listener_v4")
    keys = jax.random.split(jax.random.key(0), int(episodes))
    for name, told in (("told where to go", True), ("in silence", False)):
        returns = jax.jit(jax.vmap(partial(play, env, told)))(keys)
        print(f"  {name:20} {jnp.mean(returns):8.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
