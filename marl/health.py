"""What to say and do when something is not finite."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from marl.program import Metrics, ProgramSpec
from marl.specs import Team


class Fault(NamedTuple):
    """Something that was not finite."""

    agents: tuple[str, ...]
    quantity: str  # "observation", "reward", or a metric such as "policy_loss"
    update: int  # counted from 0
    step: int | None  # of each environment since the run began, where it is known
    seed: int

    def __str__(self) -> str:
        when = f"in update {self.update}" if self.step is None else f"at step {self.step}"
        return (
            f"{self.quantity} of {', '.join(self.agents)} is not finite {when} (seed {self.seed})"
        )


def find(team: Team, spec: ProgramSpec, metrics: Metrics, first_update: int) -> Fault | None:
    """The earliest fault of a chunk, or None; what an agent saw comes before what became of it.

    Args:
      team: whose metrics these are.
      spec: of the program.
      metrics: [updates, ...], or [updates, seeds, ...].
      first_update: number of the chunk's first update.
    """
    return next(_faults(team, spec, metrics, first_update), None)


def _faults(team: Team, spec: ProgramSpec, metrics: Metrics, first: int) -> Iterator[Fault]:
    axis = 1 if spec.num_seeds > 1 else None
    seeds = [metrics if axis is None else _take(metrics, seed) for seed in range(spec.num_seeds)]
    for index in range(len(seeds[0].finite[0])):
        for seed, of_seed in enumerate(seeds):
            yield from _of_update(team, spec, of_seed, index, first + index, seed)


def _take(metrics: Metrics, seed: int) -> Metrics:
    return jax.tree.map(lambda x: x[:, seed], metrics)


def _of_update(
    team: Team, spec: ProgramSpec, metrics: Metrics, index: int, update: int, seed: int
) -> Iterator[Fault]:
    for quantity, steps in metrics.faults._asdict().items():
        first = int(steps[index].min())
        if first < spec.rollout_length:
            agents = tuple(
                agent
                for agent, step in zip(team.agents, steps[index], strict=True)
                if step == first
            )
            step = update * spec.rollout_length + first
            yield Fault(agents, quantity, update, step, seed)
    for group, finite, learner in zip(
        team.lifted.groups, metrics.finite, metrics.learner, strict=True
    ):
        for number in np.flatnonzero(~finite[index]):
            agents = tuple(team.agents[position] for position in group.sets[number])
            named = [name for name, x in learner.items() if not np.isfinite(x[index][number])]
            yield Fault(agents, named[0] if named else "learner state", update, None, seed)


def advice(fault: Fault, replay: str) -> str:
    """The message of `NotFinite`."""
    return (
        f"{fault}. Nothing after it was saved. It comes again with: {replay}. "
        "Look at the environment if an observation or reward is named; else try a lower "
        "learning_rate or max_grad_norm. training.on_nan=skip undoes such updates and goes on"
    )


def as_json(fault: Fault, replay: str) -> dict[str, Any]:
    """What `failure.json` of a run directory holds."""
    return {**fault._asdict(), "replay": replay}
