"""Deep deterministic policy gradient (Lillicrap et al. 2016, arXiv:1509.02971).

It is TD3 with one critic, without delay and without smoothing of the target policy. With a critic
that reads all agents' observations and actions it is MADDPG (Lowe et al. 2017, arXiv:1706.02275),
whose authors' penalty on the actor's outputs is the default of `saturation_coef`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from marl.agents import td3

CRITIC = td3.CRITIC
BOUNDS = td3.BOUNDS
State = td3.State
make = td3.make
make_parts = td3.make_parts


@dataclass(frozen=True)
class Config(td3.Config):
    """What changes shapes or control flow."""

    num_critics: int = 1
    policy_delay: int = 1


class Hparams(NamedTuple):
    """The floats of `td3.Hparams`."""

    learning_rate: Any = 1e-3
    learning_rate_end: Any = 0.0
    critic_learning_rate_scale: Any = 1.0
    schedule_steps: Any = 0.0
    gamma: Any = 0.99
    tau: Any = 0.005
    exploration_noise: Any = 0.1
    exploration_noise_end: Any = 0.0
    target_noise: Any = 0.0
    noise_clip: Any = 0.5
    saturation_coef: Any = 1e-3
    max_grad_norm: Any = float("inf")
    adam_epsilon: Any = 1e-8
