"""The numbers of a training run, and what follows from them."""

from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

from marl.agents.validation import at_least, one_of
from marl.envs.errors import UsageError
from marl.specs import Team

LOWEST = {
    "seed": 0,
    "num_seeds": 1,
    "num_envs": 1,
    "rollout_length": 1,
    "reset_pool": 0,
    "log_interval": 1,
    "eval_interval": 0,
    "eval_episodes": 1,
    "checkpoint_interval": 0,
    "keep_checkpoints": 1,
}


def _whole(name: str, value: Any) -> int:
    whole = isinstance(value, Real) and not isinstance(value, bool) and float(value).is_integer()
    if not whole:
        raise UsageError(f"{name} = {value!r} is not a whole number; give one")
    return int(value)


_MOST_STEPS = 2**31 - 1  # what programs count in 32 bits


class Intervals(NamedTuple):
    """When the host does something, in updates; 0 means only at the end.

    Everything happens where a row of metrics ends: a run that goes on from a checkpoint then writes
    the rows that it would have written.
    """

    log: int
    evaluate: int
    checkpoint: int
    total: int

    def next_stop(self, done: int) -> int:
        """The first update after `done` at which the host has something to do."""
        return min(done - done % self.log + self.log, self.total)

    def due(self, every: int, done: int) -> bool:
        """Whether it is time for something that the end does anyway."""
        return bool(every) and done % every == 0 and done < self.total


class Settings(NamedTuple):
    """The arguments of `marl.train` that are numbers or words."""

    total_steps: int
    seed: int
    num_seeds: int
    num_envs: int
    rollout_length: int
    reset_pool: int
    log_interval: int
    on_nan: str
    eval_interval: int
    eval_episodes: int
    checkpoint_interval: int
    keep_checkpoints: int
    checkpoint_replay: bool

    @property
    def steps_per_update(self) -> int:
        """Environment steps of one seed in one update."""
        return self.num_envs * self.rollout_length

    @property
    def updates(self) -> int:
        """Updates that make at least `total_steps`."""
        return -(-self.total_steps // self.steps_per_update)

    @property
    def steps(self) -> int:
        """Environment steps of one seed, rounded up to whole updates."""
        return self.updates * self.steps_per_update

    @property
    def intervals(self) -> Intervals:
        """Intervals in updates, rounded up to whole rows of metrics."""

        def rows(steps: int) -> int:
            return -(-steps // (self.steps_per_update * self.log_interval)) * self.log_interval

        evaluate, checkpoint = rows(self.eval_interval), rows(self.checkpoint_interval)
        return Intervals(self.log_interval, evaluate, checkpoint, self.updates)

    @classmethod
    def of(cls, **values: Any) -> "Settings":
        """Whole numbers as `int`; raises UsageError for anything else."""
        numbers = {name: _whole(name, values[name]) for name in ("total_steps", *LOWEST)}
        return cls(**values | numbers)

    def check(self, team: Team) -> None:
        """Raise UsageError where a number is out of range or does not fit the team."""
        for name, lowest in LOWEST.items():
            at_least(name, getattr(self, name), lowest)
        if self.seed + self.num_seeds > 2**32:
            raise UsageError(f"seed = {self.seed} is out of range; seeds end at {2**32 - 1}")
        if not isinstance(self.checkpoint_replay, bool):
            raise UsageError(f"checkpoint_replay = {self.checkpoint_replay!r}; give True or False")
        one_of("on_nan", self.on_nan, ("stop", "skip"))
        if self.steps_per_update > _MOST_STEPS or self.updates > _MOST_STEPS:
            raise UsageError(
                f"num_envs * rollout_length = {self.num_envs:,} * {self.rollout_length:,} and "
                f"total_steps = {self.total_steps:,} are {self.updates:,} updates of "
                f"{self.steps_per_update:,} steps; give at most {_MOST_STEPS:,} of each"
            )
        if self.total_steps < self.steps_per_update:
            raise UsageError(
                f"total_steps = {self.total_steps:,.0f} is less than one update, which takes "
                f"num_envs * rollout_length = {self.num_envs} * {self.rollout_length} = "
                f"{self.steps_per_update:,} steps; give more steps, or fewer environments or "
                "shorter rollouts"
            )
        team.check((self.rollout_length, self.num_envs))

    def say_rounding(self, say: Callable[[str], Any]) -> None:
        """Say what is trained where `total_steps` is not a whole number of updates."""
        steps = self.steps_per_update
        if self.steps != self.total_steps:
            say(
                f"total_steps = {self.total_steps:,.0f} is {self.total_steps / steps:.1f} updates "
                f"of {steps:,} steps; training {self.updates:,} updates = {self.steps:,} steps"
            )
