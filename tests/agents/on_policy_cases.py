"""PPO and A2C of every kind, for the table of learners."""

import learner_floats
from case import Case

from marl.agents import a2c, ppo
from marl.envs.spaces import Box, Discrete, MultiDiscrete

_NORMALISED = {"normalize_observations": True, "value_normalization": "running"}
_POPART = {"normalize_observations": True, "value_normalization": "popart"}
_HUBER_DELTA = {"huber_delta": (0.5, 0.1, 0.2)}
_SCHEDULED = {"learning_rate_schedule": "linear", "entropy_schedule": "cosine"}
_SPACE, _BOX = Box((3,)), Box((2,), low=(-1.0, 0.0), high=(1.0, 5.0))
_COMPOSITE = {
    "image": Box((3, 4, 2), 0, 255, "uint8"),
    "kind": Discrete(3),
    "speed": Box((2,)),
}
_ACTIONS = {
    "aim": Box((2,), -1.0, 1.0),
    "go": Box((1,)),
    "move": MultiDiscrete((2, 3)),
    "talk": Discrete(3),
}

CASES = {
    "ppo-discrete": Case(
        ppo,
        ppo.Config(num_epochs=2, num_minibatches=2, hidden_sizes=(8,)),
        observation_space=_SPACE,
        action_space=Discrete(4),
        critic_observations=_SPACE,
        masked=True,
        floats={**learner_floats.FLOATS, **learner_floats.ENTROPY},
        replaces=False,
    ),
    "ppo-gru": Case(
        ppo,
        ppo.Config(
            num_epochs=2,
            num_minibatches=2,
            hidden_sizes=(8,),
            core="gru",
            core_size=5,
            sequence_length=3,
            burn_in=2,
        ),
        observation_space=_SPACE,
        action_space=Discrete(4),
        critic_observations=(_SPACE, Box((2,))),
        masked=True,
        floats={**learner_floats.FLOATS, **learner_floats.ENTROPY},
        replaces=False,
    ),
    "ppo-lstm": Case(
        ppo,
        ppo.Config(
            num_epochs=2,
            num_minibatches=2,
            hidden_sizes=(8,),
            core="lstm",
            core_size=5,
            value_loss="huber",
            clip_values=True,
            **_POPART,
        ),
        observation_space={"kind": Discrete(3), "speed": Box((2,))},
        action_space=Discrete(4),
        critic_observations=_SPACE,
        masked=True,
        floats={**learner_floats.FLOATS, **learner_floats.ENTROPY, **_HUBER_DELTA},
        replaces=False,
    ),
    "ppo-shared-network": Case(
        ppo,
        ppo.Config(
            num_epochs=2,
            num_minibatches=2,
            hidden_sizes=(8,),
            shared_network=True,
            core="gru",
            core_size=5,
            sequence_length=3,
            burn_in=2,
            **_POPART,
        ),
        observation_space=_SPACE,
        action_space=Discrete(4),
        critic_observations=(_SPACE,),
        masked=True,
        floats={**learner_floats.FLOATS, **learner_floats.ENTROPY},
        replaces=False,
    ),
    "ppo-box": Case(
        ppo,
        ppo.Config(
            num_epochs=2,
            num_minibatches=3,
            hidden_sizes=(8,),
            critic_hidden_sizes=(6,),
            activation="relu",
            torso="simba",
            clip_values=True,
            **_POPART,
            **_SCHEDULED,
        ),
        observation_space=_SPACE,
        action_space=_BOX,
        critic_observations=(_SPACE, Box((2,))),
        floats={
            **learner_floats.ON_POLICY,
            "clip_epsilon": (0.2, 0.1, 0.02),
            "value_clip_epsilon": (0.2, 0.1, 0.05),
        },
        replaces=False,
    ),
    "ppo-composite": Case(
        ppo,
        ppo.Config(
            num_epochs=1, num_minibatches=2, hidden_sizes=(8,), clip_values=True, **_NORMALISED
        ),
        observation_space=_COMPOSITE,
        action_space=_ACTIONS,
        critic_observations={"speed": Box((2,))},
        masked=True,
        floats={**learner_floats.FLOATS, **learner_floats.ENTROPY},
        replaces=False,
    ),
    "a2c": Case(
        a2c,
        a2c.Config(
            hidden_sizes=(8,),
            critic_hidden_sizes=(6,),
            normalize_advantages=True,
            value_loss="huber",
            **_POPART,
            **_SCHEDULED,
        ),
        observation_space=_SPACE,
        action_space={"aim": _BOX, "talk": Discrete(3)},
        critic_observations=(_SPACE, Box((2,))),
        masked=True,
        floats={**learner_floats.ON_POLICY, **_HUBER_DELTA},
    ),
    "a2c-gru": Case(
        a2c,
        a2c.Config(hidden_sizes=(8,), core="gru", core_size=5),
        observation_space=_SPACE,
        action_space=Discrete(4),
        critic_observations=(_SPACE, Box((2,))),
        masked=True,
        floats={**learner_floats.FLOATS, **learner_floats.ENTROPY},
    ),
    "a2c-shared-network": Case(
        a2c,
        a2c.Config(hidden_sizes=(8,), shared_network=True, **_NORMALISED),
        observation_space=_SPACE,
        action_space={"aim": _BOX, "talk": Discrete(3)},
        critic_observations=_SPACE,
        masked=True,
        floats={**learner_floats.FLOATS, **learner_floats.ENTROPY},
    ),
}
