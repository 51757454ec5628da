"""The suite "toy": environments that take no time and whose best returns are known.

All are episodic, compare and hash by value, and say in their docstrings what the optimum is.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from marl.envs import features, games, oddities, probes
from marl.envs.errors import UsageError, nearest

# name -> constructor, note
TOYS: dict[str, tuple[Callable[..., Any], str]] = {
    "cooperative": (games.cooperative, "2 agents; matrix game, best return 1"),
    "climbing": (games.climbing, "2 agents; matrix game, best return 11"),
    "penalty": (games.penalty, "2 agents; matrix game, best return 10; k"),
    "prisoners_dilemma": (games.prisoners_dilemma, "2 agents; matrix game, equilibrium at 1"),
    "two_step": (games.TwoStep, "2 agents; two-step game, best return 8; payoff, safe"),
    "matrix": (games.MatrixGame, "2 agents; rows, columns: payoffs of any matrix game"),
    "roster": (games.Roster, "12 agents; agent i gets i; names, by_action"),
    "time_limit": (features.Continuing, "2 agents; value reward / (1 - gamma); reward, limit"),
    "masked": (features.Masked, "2 agents; action masks, best return 2"),
    "hidden": (features.Hidden, "2 agents; only the global state shows the reward"),
    "image": (features.Image, "2 agents; uint8 images, best return 1"),
    "heterogeneous": (oddities.Heterogeneous, "4 agents of 3 kinds; best return 4 each; length"),
    "death": (oddities.Death, "2 agents, one terminates early; death, length, poison"),
    "sacrifice": (oddities.Sacrifice, "2 agents; the best return of the team is 2, by a death"),
    **{
        f"probe_{kind}": (partial(probes.Probe, kind), "1 agent; num_agents")
        for kind in probes.KINDS
    },
}


def make(name: str, **kwargs: Any) -> Any:
    """The episodic environment `name`. Raises UsageError for an unknown name or argument."""
    if name not in TOYS:
        raise UsageError(f"no environment toy/{name}: {nearest(name, TOYS, 30)}")
    constructor = TOYS[name][0]
    known = inspect.signature(constructor).parameters
    if unknown := [key for key in kwargs if key not in known]:
        raise UsageError(f"toy/{name} has no argument {unknown[0]!r}: {nearest(unknown[0], known)}")
    try:
        return constructor(**kwargs)
    except TypeError as error:
        raise UsageError(
            f"toy/{name} cannot be built with {kwargs or 'no arguments'}: {error}; "
            f"its arguments are {', '.join(known) or 'none'}"
        ) from error


def listing() -> list[tuple[str, str, str]]:
    """(name, note, ""): all of them can be built."""
    return [(name, note, "") for name, (_, note) in TOYS.items()]
