"""What an experiment is made of: the sections of a configuration, and what their values may be."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_origin

from marl.envs.errors import UsageError
from marl.options import coerce, learner_options, order_overrides, shown, unknown_key


@dataclass
class EnvConfig:
    """Which environment: `suite/name` or `package.module:factory`, and what it is called with."""

    id: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class TeamConfig:
    """The arguments of `marl.team`; `learner` holds a name and any option of that learner."""

    learner: dict[str, Any] = field(default_factory=lambda: {"name": "ppo"})
    critic: Any = "self"
    sharing: Any = "none"
    reward_teams: Any = "none"
    reward_pooling: str = "mean"
    death: str = "auto"
    shaped_reward: dict[str, Any] = field(default_factory=dict)
    reward_scale: float = 1.0
    normalize_rewards: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)
    agent_ids: bool = True
    mixer: str = "none"
    replay: dict[str, Any] = field(default_factory=dict)
    update_order: str = "simultaneous"
    vectorise: bool = True


@dataclass
class TrainingConfig:
    """How long and how wide; `total_steps` counts environment steps of one seed."""

    total_steps: int = 1_000_000
    num_envs: int = 16
    rollout_length: int = 128
    seed: int = 0
    num_seeds: int = 1
    reset_pool: int = 0
    log_interval: int = 10
    on_nan: str = "stop"


@dataclass
class EvaluationConfig:
    """Episodes per evaluation, and environment steps between two (0: only at the end)."""

    interval: int = 0
    episodes: int = 100


@dataclass
class CheckpointConfig:
    """Environment steps between checkpoints (0: only at the end), how many to keep, and whether
    the replay buffer is in them."""

    interval: int = 0
    keep: int = 3
    replay: bool = True


@dataclass
class Config:
    """One experiment. Treat it as frozen: the functions below are its only writers."""

    env: EnvConfig = field(default_factory=EnvConfig)
    team: TeamConfig = field(default_factory=TeamConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


RANGES = {
    "training.total_steps": (1, None),
    "training.num_envs": (1, None),
    "training.rollout_length": (1, None),
    "training.seed": (0, 2**32 - 1),
    "training.num_seeds": (1, None),
    "training.reset_pool": (0, None),
    "training.log_interval": (1, None),
    "evaluation.interval": (0, None),
    "evaluation.episodes": (1, None),
    "checkpoint.interval": (0, None),
    "checkpoint.keep": (1, None),
}
SHORTHANDS = {"env": "id", "team.learner": "name"}  # `env=X` stands for `env.id=X`


def checked(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer with shorthands spelled out, its keys known and its values of their fields' types."""
    return _checked_section("", layer, Config)


def _checked_section(key: str, layer: Any, schema: type) -> dict[str, Any]:
    prefix = f"{key}." if key else ""
    fields = {field.name: field for field in dataclasses.fields(schema)}
    if layer is None:
        return {}
    if key in SHORTHANDS and isinstance(layer, str):
        layer = {SHORTHANDS[key]: layer}
    if not isinstance(layer, Mapping):
        keys = ", ".join(prefix + name for name in fields)
        raise UsageError(f"{key}={shown(layer)}: {key!r} is a section; set one of {keys}")
    checked = {}
    for name, value in layer.items():
        if name not in fields:
            raise unknown_key(prefix, name, fields, _all_keys())
        kind = fields[name].type
        if dataclasses.is_dataclass(kind):
            checked[name] = _checked_section(prefix + name, value, kind)  # type: ignore[arg-type]
        elif get_origin(kind) is dict:
            checked[name] = _checked_mapping(prefix + name, value)
        else:
            checked[name] = coerce(prefix + name, value, kind)
    return checked


def _checked_mapping(key: str, value: Any) -> dict[str, Any]:
    """A section of free keys; what they may be is up to the environment or the learner."""
    if key in SHORTHANDS and isinstance(value, str):
        value = {SHORTHANDS[key]: value}
    value = coerce(key, {} if value is None else value, dict)
    for name in value:
        if not isinstance(name, str):
            hint = " (YAML reads unquoted yes, no, on, off as booleans)" * isinstance(name, bool)
            raise UsageError(f"{key}.{shown(name)}: keys are text; quote this one{hint}")
    return order_overrides({}, value) if key == "team.overrides" else value


def _all_keys() -> Iterator[str]:
    for section in dataclasses.fields(Config):
        for entry in dataclasses.fields(section.type):  # type: ignore[arg-type]
            yield f"{section.name}.{entry.name}"
    for option in learner_options("ppo"):
        yield f"team.learner.{option}"


def check_ranges(config: Config) -> None:
    for key, (least, most) in RANGES.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value < least or (most is not None and value > most):
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise UsageError(f"{key}={value}: expected {bound}")
    training = config.training
    if training.on_nan not in ("stop", "skip"):
        raise UsageError(f"training.on_nan={training.on_nan}: expected stop or skip")
    update = training.num_envs * training.rollout_length
    if training.total_steps < update:
        product = "training.num_envs * training.rollout_length"
        raise UsageError(
            f"training.total_steps={training.total_steps} is less than one update, which takes "
            f"{product} = {training.num_envs} * {training.rollout_length} = {update} steps; give "
            "more steps, or fewer environments or shorter rollouts"
        )
