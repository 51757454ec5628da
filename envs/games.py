"""One-step games: matrix games, and a roster of agents that tells orders of agents apart."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from marl.envs.errors import UsageError
from marl.envs.interface import TimeStep
from marl.envs.probes import Count, together
from marl.envs.spaces import Box, Discrete, SpaceTree

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class MatrixGame:
    """One step of two players: "row" and "column" get `rows[i][j]` and `columns[i][j]`.

    Both see the constant 1.
    """

    rows: Matrix
    columns: Matrix

    def __post_init__(self):
        for name in ("rows", "columns"):
            matrix = tuple(tuple(map(float, row)) for row in getattr(self, name))
            object.__setattr__(self, name, matrix)
        shapes = [{len(row) for row in self.rows}, {len(row) for row in self.columns}]
        if len(self.rows) != len(self.columns) or shapes[0] != shapes[1] or len(shapes[0]) != 1:
            raise UsageError("the two payoff matrices of a MatrixGame differ in shape")

    @property
    def agents(self) -> tuple[str, ...]:
        return ("row", "column")

    @property
    def observation_spaces(self) -> dict[str, SpaceTree]:
        return dict.fromkeys(self.agents, Box((1,), 0, 1))

    @property
    def action_spaces(self) -> dict[str, SpaceTree]:
        return {"row": Discrete(len(self.rows)), "column": Discrete(len(self.rows[0]))}

    def reset(self, key: jax.Array) -> tuple[dict[str, jax.Array], Count]:
        del key
        return self._observe(), Count.zero()

    def step(
        self, key: jax.Array, state: Count, action: dict[str, jax.Array]
    ) -> tuple[TimeStep, Count]:
        del key
        played = action["row"], action["column"]
        reward = {
            "row": jnp.asarray(self.rows, jnp.float32)[played],
            "column": jnp.asarray(self.columns, jnp.float32)[played],
        }
        return together(self._observe(), reward, True), Count(state.step + 1)

    def action_mask(self, state: Count) -> None:
        return None

    def global_state(self, state: Count) -> None:
        return None

    def _observe(self) -> dict[str, jax.Array]:
        return {agent: jnp.ones((1,), jnp.float32) for agent in self.agents}


def shared_game(payoff: Matrix) -> MatrixGame:
    """A matrix game in which both players get the same."""
    return MatrixGame(rows=payoff, columns=payoff)


def cooperative() -> MatrixGame:
    """Two actions; (0, 0) pays 1, which is the best and what independent learners find."""
    return shared_game(((1.0, 0.0), (0.0, 0.5)))


def climbing() -> MatrixGame:
    """The climbing game (Claus and Boutilier, 1998): best 11 at (0, 0), next to -30."""
    return shared_game(((11.0, -30.0, 0.0), (-30.0, 7.0, 6.0), (0.0, 0.0, 5.0)))


def penalty(k: float = -100.0) -> MatrixGame:
    """The penalty game (Claus and Boutilier, 1998): best 10 at (0, 0) and (2, 2), `k` if mixed."""
    return shared_game(((10.0, 0.0, k), (0.0, 2.0, 0.0), (k, 0.0, 10.0)))


def prisoners_dilemma() -> MatrixGame:
    """0 cooperates, 1 defects: 3 each if both cooperate; the only equilibrium pays 1 each."""
    return MatrixGame(rows=((3.0, 0.0), (5.0, 1.0)), columns=((3.0, 5.0), (0.0, 1.0)))


class Reached(NamedTuple):
    """State of `TwoStep`."""

    place: jax.Array  # [] int32: 0 the first step, 1 the safe matrix, 2 the other


@dataclass(frozen=True)
class TwoStep:
    """The two-step game (Rashid et al. 2018, arXiv:1803.11485, section 3.1), of two players.

    In the first step the first player alone chooses: action 0 leads to where every action pays
    `safe`, action 1 to the matrix `payoff`. Both see which of the three places they are in, and get
    the same. With the payoffs of the paper the best return is 8; a sum of own values cannot tell
    them (7 is what it finds). With ((0, 4), (4, 8)) a sum can, but values that average over the
    other's random actions cannot: 6.
    """

    payoff: Matrix = ((0.0, 1.0), (1.0, 8.0))
    safe: float = 7.0

    def __post_init__(self):
        object.__setattr__(self, "payoff", tuple(tuple(map(float, row)) for row in self.payoff))
        if [len(row) for row in self.payoff] != [2, 2]:
            raise UsageError(f"payoff = {self.payoff}; expected two rows of two numbers")

    @property
    def agents(self) -> tuple[str, ...]:
        return ("first", "second")

    @property
    def observation_spaces(self) -> dict[str, SpaceTree]:
        return dict.fromkeys(self.agents, Discrete(3))

    @property
    def action_spaces(self) -> dict[str, SpaceTree]:
        return dict.fromkeys(self.agents, Discrete(2))

    def reset(self, key: jax.Array) -> tuple[dict[str, jax.Array], Reached]:
        del key
        return dict.fromkeys(self.agents, jnp.int32(0)), Reached(jnp.int32(0))

    def step(
        self, key: jax.Array, state: Reached, action: dict[str, jax.Array]
    ) -> tuple[TimeStep, Reached]:
        del key
        risky = jnp.asarray(self.payoff)[action["first"], action["second"]]
        paid = jnp.where(state.place == 2, risky, self.safe)
        reward = jnp.where(state.place == 0, 0.0, paid)
        place = jnp.where(state.place == 0, 1 + action["first"].astype(jnp.int32), state.place)
        obs = dict.fromkeys(self.agents, place)
        over = state.place > 0
        return together(obs, dict.fromkeys(self.agents, reward), over), Reached(place)

    def action_mask(self, state: Reached) -> None:
        return None

    def global_state(self, state: Reached) -> jax.Array:
        return jax.nn.one_hot(state.place, 3)


@dataclass(frozen=True)
class Roster:
    """One step of agents that differ only in their number: agent i sees i and gets i.

    Its names in declared order, a0 .. a11 by default, sort in another order. With `by_action` it
    gets i only for action 1, else 0; the best return, and value, of agent i is i either way.
    """

    names: tuple[str, ...] = tuple(f"a{i}" for i in range(12))
    by_action: bool = False

    def __post_init__(self):
        object.__setattr__(self, "names", tuple(self.names))
        if len(set(self.names)) != len(self.names) or not self.names:
            raise UsageError(f"names = {self.names}; expected at least one, and all different")

    @property
    def agents(self) -> tuple[str, ...]:
        return self.names

    @property
    def observation_spaces(self) -> dict[str, SpaceTree]:
        return dict.fromkeys(self.names, Box((1,), 0, len(self.names)))

    @property
    def action_spaces(self) -> dict[str, SpaceTree]:
        return dict.fromkeys(self.names, Discrete(2))

    def reset(self, key: jax.Array) -> tuple[dict[str, jax.Array], Count]:
        del key
        return self._observe(), Count.zero()

    def step(
        self, key: jax.Array, state: Count, action: dict[str, jax.Array]
    ) -> tuple[TimeStep, Count]:
        del key
        reward = {
            agent: jnp.where(action[agent] == 1, i, 0) if self.by_action else i
            for i, agent in enumerate(self.names)
        }
        return together(self._observe(), reward, True), Count(state.step + 1)

    def action_mask(self, state: Count) -> None:
        return None

    def global_state(self, state: Count) -> None:
        return None

    def _observe(self) -> dict[str, jax.Array]:
        return {agent: jnp.full((1,), i, jnp.float32) for i, agent in enumerate(self.names)}
