"""The configuration of a run that was started from Python, so that it can be loaded again."""

from collections.abc import Mapping
from typing import Any

from marl.envs import registry as environments
from marl.specs import Team

NAMELESS = "object:"  # before the type of an environment or learner that has no id


def record(team: Team, training: Mapping[str, Any]) -> dict[str, Any]:
    """Sections as `marl.config` has them.

    An environment or learner given as an object is recorded as "object:" and its type; whoever
    loads the run then has to give it again.
    """
    request = dict(team.request)
    options = request.pop("learner_options")
    origin = environments.origin(team.source)
    env_id, kwargs = origin or (NAMELESS + type(team.source).__name__, {})
    renamed = {
        "eval_interval": ("evaluation", "interval"),
        "eval_episodes": ("evaluation", "episodes"),
        "checkpoint_interval": ("checkpoint", "interval"),
        "keep_checkpoints": ("checkpoint", "keep"),
        "checkpoint_replay": ("checkpoint", "replay"),
    }
    config: dict[str, Any] = {
        "env": {"id": env_id, "kwargs": dict(kwargs)},
        "team": {
            **request,
            "learner": {"name": learner_name(request["learner"]), **options},
            "overrides": {
                pattern: {
                    option: learner_name(value) if option == "learner" else value
                    for option, value in changes.items()
                }
                for pattern, changes in request["overrides"].items()
            },
        },
        "training": {},
        "evaluation": {},
        "checkpoint": {},
    }
    for name, value in training.items():
        section, key = renamed.get(name, ("training", name))
        config[section][key] = value
    return config


def learner_name(learner: Any) -> str:
    """What the registry takes for `learner`, or "object:" and its type."""
    if isinstance(learner, str):
        return learner
    module = getattr(learner, "__spec__", None)
    return learner.__name__ if module is not None else NAMELESS + type(learner).__name__


def nameless(value: str) -> bool:
    return value.startswith(NAMELESS)
