"""What SAC reads: images and composites, of observations and of critic inputs."""

import jax
import jax.numpy as jnp
from learner_cases import (
    sampled,
)
from q_critic_cases import (
    BATCH,
    QCase,
    make_windows,
)

from marl.agents import sac
from marl.agents.learner import CriticSpace
from marl.envs.spaces import Box, Discrete

SMALL = sac.Config(hidden_sizes=(8,), activation="tanh")


def test_images_and_composites_are_read():
    """Of observations and critic inputs; nothing but shapes, so nothing is compiled."""
    observations = {"image": Box((4, 4, 1), 0, 255, "uint8"), "kind": Discrete(3)}
    case = CriticSpace((observations, Box((2,))), ())
    learner = sac.make(SMALL, observations, Discrete(2), case)
    windows = make_windows(QCase(sac, SMALL, Discrete(2)))
    windows = windows._replace(
        context=(),
        next_context=(),
        **{name: sampled(0, observations, (3, BATCH)) for name in ("obs", "final_obs")},
        **{
            name: sampled(0, case.observations, (3, BATCH))
            for name in ("critic_obs", "final_critic_obs")
        },
    )
    hparams = jax.tree.map(jnp.float32, sac.Hparams())
    state = jax.eval_shape(learner.init, jax.random.key(0), hparams)
    after, _ = jax.eval_shape(learner.update, jax.random.key(0), state, windows, hparams)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert [x.shape for x in jax.tree.leaves(after)] == [x.shape for x in jax.tree.leaves(state)]
