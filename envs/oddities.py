"""Toy environments that have one thing each that multi-agent code gets wrong; optima known."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl.envs.errors import UsageError
from marl.envs.interface import TimeStep
from marl.envs.probes import Count, Drawn, together
from marl.envs.spaces import Box, Discrete, MultiDiscrete, SpaceTree


@dataclass(frozen=True)
class Heterogeneous:
    """Four agents of three kinds, which do not interact; best return: `length` for each.

    - scout_0, scout_1: see a uint8 image [3, 3, 1] with one bright column, and a constant; choose
      the column: reward 1 if right.
    - pilot: sees a mode (0 or 1) and two targets in [-1, 1]; acts with a mode and two thrusts:
      1/2 for the right mode, and 1/2 less half the mean squared error of the thrusts.
    - crew: sees two integers and repeats them: 1/2 for each right one.
    """

    length: int = 4

    @property
    def agents(self) -> tuple[str, ...]:
        return ("scout_0", "scout_1", "pilot", "crew")

    @property
    def observation_spaces(self) -> dict[str, SpaceTree]:
        image = Box((3, 3, 1), low=0, high=255, dtype="uint8")
        scout = {"image": image, "constant": Box((1,), low=0, high=1)}
        crew = MultiDiscrete((3, 2))
        return {"scout_0": scout, "scout_1": scout, "pilot": Box((3,), -1, 1), "crew": crew}

    @property
    def action_spaces(self) -> dict[str, SpaceTree]:
        return {
            "scout_0": Discrete(3),
            "scout_1": Discrete(3),
            "pilot": {"mode": Discrete(2), "thrust": Box((2,), -1, 1)},
            "crew": MultiDiscrete((3, 2)),
        }

    def reset(self, key: jax.Array) -> tuple[dict[str, Any], Drawn]:
        state = Drawn(step=jnp.zeros((), jnp.int32), draw=_targets(key))
        return _see_targets(state.draw), state

    def step(self, key: jax.Array, state: Drawn, action: dict[str, Any]) -> tuple[TimeStep, Drawn]:
        target, pilot = state.draw, action["pilot"]
        error = jnp.square(pilot["thrust"] - target["thrust"]).mean()
        reward = {
            "scout_0": action["scout_0"] == target["columns"][0],
            "scout_1": action["scout_1"] == target["columns"][1],
            "pilot": (pilot["mode"] == target["mode"]) / 2 + (1 - error) / 2,
            "crew": (action["crew"] == target["crew"]).mean(),
        }
        reached = Drawn(step=state.step + 1, draw=_targets(key))
        over = reached.step >= self.length
        return together(_see_targets(reached.draw), reward, over), reached

    def action_mask(self, state: Drawn) -> None:
        return None

    def global_state(self, state: Drawn) -> None:
        return None


def _targets(key: jax.Array) -> dict[str, jax.Array]:
    """What each agent has to do next."""
    key_columns, key_mode, key_thrust, key_crew = jax.random.split(key, 4)
    return {
        "columns": jax.random.randint(key_columns, (2,), 0, 3),
        "mode": jax.random.randint(key_mode, (), 0, 2),
        "thrust": jax.random.uniform(key_thrust, (2,), minval=-1, maxval=1),
        "crew": jax.random.randint(key_crew, (2,), 0, jnp.asarray((3, 2))),
    }


def _see_targets(target: dict[str, jax.Array]) -> dict[str, Any]:
    bright = (jnp.arange(3) == target["columns"][:, None]).astype(jnp.uint8) * jnp.uint8(255)
    images = jnp.broadcast_to(bright[:, None, :, None], (2, 3, 3, 1))
    scouts = {
        f"scout_{i}": {"image": images[i], "constant": jnp.ones((1,), jnp.float32)}
        for i in range(2)
    }
    pilot = jnp.concatenate([target["mode"][None].astype(jnp.float32), target["thrust"]])
    return scouts | {"pilot": pilot, "crew": target["crew"]}


@dataclass(frozen=True)
class Death:
    """Agent "early" terminates in step `death`, "late" goes on to step `length`, and terminates.

    Every step pays 1 to each agent that is active in it: returns are `death` and `length`, whatever
    the agents do. An agent sees the number of steps taken, divided by `length`; when it is out, it
    sees zeros. With `poison` its observations and rewards are NaN then, which nobody may read.
    """

    death: int = 2
    length: int = 5
    poison: bool = False

    def __post_init__(self):
        if not 1 <= self.death < self.length:
            raise UsageError(
                f"Death has death = {self.death}, length = {self.length}; "
                "expected 1 <= death < length"
            )

    @property
    def agents(self) -> tuple[str, ...]:
        return ("early", "late")

    @property
    def observation_spaces(self) -> dict[str, SpaceTree]:
        return dict.fromkeys(self.agents, Box((1,), 0, 1))

    @property
    def action_spaces(self) -> dict[str, SpaceTree]:
        return dict.fromkeys(self.agents, Discrete(2))

    def reset(self, key: jax.Array) -> tuple[dict[str, jax.Array], Count]:
        del key
        return self._observe(Count.zero()), Count.zero()

    def step(self, key: jax.Array, state: Count, action: Any) -> tuple[TimeStep, Count]:
        del key, action
        reached = Count(state.step + 1)
        obs, over = self._observe(reached), reached.step >= self.length
        out = jnp.asarray(jnp.nan if self.poison else 0.0, jnp.float32)
        dies, alive = reached.step == self.death, reached.step < self.death
        never = jnp.zeros((), bool)
        timestep = TimeStep(
            obs=obs,
            reward={
                "early": jnp.where(state.step < self.death, 1.0, out),
                "late": jnp.ones((), jnp.float32),
            },
            terminated={"early": dies, "late": over},
            truncated={"early": never, "late": never},
            active={"early": alive, "late": ~over},
            episode_over=over,
            final_obs=obs,
            final_extras=(),
            info=(),
        )
        return timestep, reached

    def action_mask(self, state: Count) -> None:
        return None

    def global_state(self, state: Count) -> None:
        return None

    def _observe(self, state: Count) -> dict[str, jax.Array]:
        seen = (state.step / self.length).astype(jnp.float32)[None]
        out = jnp.full((1,), jnp.nan if self.poison else 0.0, jnp.float32)
        return {"early": jnp.where(state.step < self.death, seen, out), "late": seen}


class SacrificeState(NamedTuple):
    """State of `Sacrifice`."""

    step: jax.Array  # [] int32
    alive: jax.Array  # [] bool: the hero is


@dataclass(frozen=True)
class Sacrifice:
    """The agent "hero" may die in the first step (action 1), which wins the game for its team.

    While the hero lives it gets `wage` in each step. At the episode's end, after `length` steps,
    "friend" gets `prize` if the hero is dead. As a team the best return is `prize`, by dying; a
    learner that ends the hero's return with its death never sees the prize and lives for
    `wage * length`.
    """

    length: int = 4
    wage: float = 0.1
    prize: float = 2.0

    @property
    def agents(self) -> tuple[str, ...]:
        return ("hero", "friend")

    @property
    def observation_spaces(self) -> dict[str, SpaceTree]:
        return dict.fromkeys(self.agents, Box((2,), 0, 1))

    @property
    def action_spaces(self) -> dict[str, SpaceTree]:
        return dict.fromkeys(self.agents, Discrete(2))

    def reset(self, key: jax.Array) -> tuple[dict[str, jax.Array], SacrificeState]:
        del key
        state = SacrificeState(step=jnp.zeros((), jnp.int32), alive=jnp.ones((), bool))
        return self._observe(state), state

    def step(
        self, key: jax.Array, state: SacrificeState, action: dict[str, jax.Array]
    ) -> tuple[TimeStep, SacrificeState]:
        del key
        dies = state.alive & (state.step == 0) & (action["hero"] == 1)
        reached = SacrificeState(step=state.step + 1, alive=state.alive & ~dies)
        obs, over = self._observe(reached), reached.step >= self.length
        never = jnp.zeros((), bool)
        timestep = TimeStep(
            obs=obs,
            reward={
                "hero": jnp.where(reached.alive, self.wage, 0.0).astype(jnp.float32),
                "friend": jnp.where(over & ~reached.alive, self.prize, 0.0).astype(jnp.float32),
            },
            terminated={"hero": dies | (over & state.alive), "friend": over},
            truncated={"hero": never, "friend": never},
            active={"hero": reached.alive & ~over, "friend": ~over},
            episode_over=over,
            final_obs=obs,
            final_extras=(),
            info={"success": over & ~reached.alive},
        )
        return timestep, reached

    def action_mask(self, state: SacrificeState) -> None:
        return None

    def global_state(self, state: SacrificeState) -> jax.Array:
        return self._observe(state)["friend"]

    def _observe(self, state: SacrificeState) -> dict[str, jax.Array]:
        alive = state.alive.astype(jnp.float32)
        seen = jnp.stack([(state.step / self.length).astype(jnp.float32), alive])
        return {"hero": seen * alive, "friend": seen}
