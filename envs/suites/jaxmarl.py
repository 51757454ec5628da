"""JaxMARL's environments, as episodic environments of this package's interface.

The observation that ends an episode is kept (JaxMARL's own `step` resets it away), time limits are
truncations, keys that are not agents are split off, rewards are float32, and spaces have the shapes
and dtypes that `reset` really returns. In `storm*` and `coin_game` an episode is a series of games
and JaxMARL deals the next game within the step that ends one, the last one too; there `final_obs`
is the first observation of a next game.

`info` holds "success" (SMAX against built-in enemies: [] bool, the battle is won), "shaped_reward"
(overcooked: by agent, [] float32) and "inner_episode_done" (coin_game: [] bool), and nothing else.
"""

import contextlib
import importlib.util
import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl.envs.errors import UsageError, nearest
from marl.envs.frozen import freeze, thaw
from marl.envs.interface import TimeStep
from marl.envs.spaces import Discrete
from marl.envs.suites.jaxmarl_spaces import action_space, observation_space
from marl.envs.suites.jaxmarl_table import FAMILIES, TABLE, UNAVAILABLE, Family
from marl.envs.suites.quiet import quiet, quiet_mujoco

TIME_LIMITS = ("truncate", "terminate")


class JaxmarlState(NamedTuple):
    """State of a `JaxmarlEnvironment`."""

    env: Any  # JaxMARL's state
    active: dict[str, jax.Array]  # [] bool per agent: acts in the next step


class Built(NamedTuple):
    """What stands behind a `JaxmarlEnvironment`, made once for all equal ones."""

    env: Any
    family: Family
    agents: dict[str, Any]  # our agent id -> JaxMARL's, in declared order
    observation_spaces: dict[str, Any]
    action_spaces: dict[str, Any]

    def observe(self, obs: Any) -> dict[str, Any]:
        """Observations by agent, without anything that is not an agent's."""
        return {
            agent: jax.tree.map(_strong, self.family.observe(obs, inner, index))
            for index, (agent, inner) in enumerate(self.agents.items())
        }


@dataclass(frozen=True)
class JaxmarlEnvironment:
    """One of JaxMARL's environments; `make` builds it.

    Attributes:
      id: JaxMARL's id.
      kwargs: the constructor's arguments, as `frozen.freeze` gives them for a dict.
      time_limit: "truncate", or "terminate" for JaxMARL's own reading of a time limit.
    """

    id: str
    kwargs: Any = freeze({})
    time_limit: str = "truncate"

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(self._built.agents)

    @property
    def observation_spaces(self) -> dict[str, Any]:
        return dict(self._built.observation_spaces)

    @property
    def action_spaces(self) -> dict[str, Any]:
        return dict(self._built.action_spaces)

    @property
    def _built(self) -> Built:
        return _build(self.id, self.kwargs)

    def reset(self, key: jax.Array) -> tuple[dict[str, Any], JaxmarlState]:
        built = self._built
        with quiet():
            obs, state = built.env.reset(key)
        active = {agent: jnp.ones((), bool) for agent in built.agents}
        return built.observe(obs), JaxmarlState(jax.tree.map(_strong, state), active)

    def step(
        self, key: jax.Array, state: JaxmarlState, action: dict[str, Any]
    ) -> tuple[TimeStep, JaxmarlState]:
        built = self._built
        actions = {inner: action[agent] for agent, inner in built.agents.items()}
        with quiet():
            obs, after, reward, dones, info = built.env.step_env(key, state.env, actions)
        over = _strong(dones["__all__"])
        out = {agent: dones.get(inner, over) | over for agent, inner in built.agents.items()}
        cut = self._cut(state.env, actions, after, info, over)
        was_active = state.active
        active = {agent: was_active[agent] & ~out[agent] for agent in out}
        obs = built.observe(obs)
        timestep = TimeStep(
            obs=obs,
            reward={a: _float(r) for a, r in _split_reward(reward, built.agents).items()},
            terminated={a: was_active[a] & out[a] & ~cut[a] for a in out},
            truncated={a: was_active[a] & cut[a] for a in out},
            active=active,
            episode_over=over,
            final_obs=obs,
            final_extras=(),
            info=self._info(after, info),
        )
        return timestep, JaxmarlState(jax.tree.map(_strong, after), active)

    def action_mask(self, state: JaxmarlState) -> dict[str, jax.Array] | None:
        built = self._built
        if built.family.mask is None or not _discrete(built):
            return None
        with quiet():
            masks = built.family.mask(built.env, state.env)
        return {agent: masks[inner].astype(bool) for agent, inner in built.agents.items()}

    def global_state(self, state: JaxmarlState) -> jax.Array | None:
        built = self._built
        if built.family.global_state is None:
            return None
        with quiet():
            return _strong(built.family.global_state(built.env, state.env))

    def _cut(self, before: Any, actions: Any, after: Any, info: Any, over: Any) -> dict[str, Any]:
        """Per agent: the time limit ended its episode in this step."""
        built = self._built
        if self.time_limit == "terminate":
            return {agent: jnp.zeros((), bool) for agent in built.agents}
        cut = built.family.cut(built.env, before, actions, after, info)
        cut = over & jnp.broadcast_to(cut, (len(built.agents),))
        return {agent: cut[index] for index, agent in enumerate(built.agents)}

    def _info(self, after: Any, info: Any) -> dict[str, Any]:
        built = self._built
        kept: dict[str, Any] = {}
        if built.family.success is not None:
            kept["success"] = built.family.success(built.env, after)
        if "shaped_reward" in info:
            shaped = info["shaped_reward"]
            kept["shaped_reward"] = {a: _float(shaped[inner]) for a, inner in built.agents.items()}
        if "inner_episode_done" in info:
            kept["inner_episode_done"] = _strong(info["inner_episode_done"])
        return kept


def make(name: str, time_limit: str = "truncate", **kwargs: Any) -> JaxmarlEnvironment:
    """The episodic environment `name`; SMAX scenarios and overcooked layouts go by their names.

    Raises:
      UsageError: no such environment, or it cannot be built with these arguments.
    """
    if name in UNAVAILABLE:
        raise UsageError(f"jaxmarl/{name} cannot be built here: it {UNAVAILABLE[name]}")
    if name not in TABLE:
        raise UsageError(f"no environment jaxmarl/{name}: {nearest(name, TABLE)}")
    if time_limit not in TIME_LIMITS:
        raise UsageError(
            f"jaxmarl/{name} was given time_limit = {time_limit!r}; "
            f"choose from {', '.join(TIME_LIMITS)}"
        )
    if reason := _missing(name):
        raise UsageError(f"jaxmarl/{name} cannot be built here: it {reason}")
    env = JaxmarlEnvironment(name, freeze(kwargs), time_limit)
    _build(env.id, env.kwargs)
    return env


def listing() -> list[tuple[str, str, str]]:
    """(name, agents and notes, why it cannot be built here or ""); builds nothing."""
    rows = [
        (name, "; ".join(filter(None, (row.agents, row.note))), _missing(name))
        for name, row in TABLE.items()
    ]
    return rows + [(name, "", reason) for name, reason in UNAVAILABLE.items()]


def _missing(name: str) -> str:
    """The package that `name` needs and that is not installed, as a clause; else ""."""
    if FAMILIES[TABLE[name].family].is_brax and importlib.util.find_spec("brax") is None:
        return "needs brax, which is not installed; pip install 'marl[mabrax]'"
    return ""


@cache
def _build(name: str, frozen: Any) -> Built:
    """JaxMARL's object and what is known of it. Raises UsageError where it cannot be made."""
    family, kwargs = FAMILIES[TABLE[name].family], thaw(frozen)
    with quiet(), jax.ensure_compile_time_eval():
        import jaxmarl.environments

        constructor = getattr(jaxmarl.environments, TABLE[name].constructor)
        parameters = _parameters(constructor, family, jaxmarl.environments)
        _check_names(name, kwargs, parameters, family)
        arguments = _resolve(name, kwargs, family) | dict(family.fixed)
        try:
            with quiet_mujoco() if family.is_brax else contextlib.nullcontext():
                env = constructor(**arguments)
            agents = {a if isinstance(a, str) else f"agent_{a}": a for a in env.agents}
            built = Built(env, family, agents, {}, {})
            real = jax.eval_shape(lambda key: built.observe(env.reset(key)[0]), jax.random.key(0))
        except Exception as error:
            raise UsageError(
                f"jaxmarl/{name} cannot be built with {kwargs or 'its defaults'}: "
                f"{type(error).__name__}: {error}. Its arguments are {', '.join(parameters)}"
            ) from error
    declared = {agent: env.observation_space(inner) for agent, inner in agents.items()}
    return built._replace(
        observation_spaces={a: observation_space(declared[a], real[a]) for a in agents},
        action_spaces={a: action_space(env.action_space(b)) for a, b in agents.items()},
    )


def _parameters(constructor: Any, family: Family, environments: Any) -> list[str]:
    """The names of the arguments a user may give."""
    classes = [constructor, *([getattr(environments, family.inherits)] if family.inherits else [])]
    found = [p for cls in classes for p in inspect.signature(cls).parameters.values()]
    shown = [p.name for p in found if p.kind != inspect.Parameter.VAR_KEYWORD]
    return list(dict.fromkeys([*shown, *family.parameters, "time_limit"]))


def _check_names(name: str, kwargs: dict[str, Any], parameters: list[str], family: Family) -> None:
    unknown = [key for key in kwargs if key not in parameters]
    if unknown and not family.is_brax:
        raise UsageError(
            f"jaxmarl/{name} has no argument {unknown[0]!r}: {nearest(unknown[0], parameters, 40)}"
        )


def _resolve(name: str, kwargs: dict[str, Any], family: Family) -> dict[str, Any]:
    """Arguments as the constructor takes them: names looked up, lists made arrays."""
    arrays = {
        key: jnp.asarray(value)
        for key, value in kwargs.items()
        if key in family.arrays and isinstance(value, list | tuple)
    }
    named = {}
    if "scenario" in kwargs and kwargs["scenario"] is not None:
        from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO

        named["scenario"] = _look_up(name, kwargs, "scenario", MAP_NAME_TO_SCENARIO)
    if name == "overcooked" and "layout" in kwargs:
        from jaxmarl.environments.overcooked import overcooked_layouts

        named["layout"] = _look_up(name, kwargs, "layout", overcooked_layouts)
    return kwargs | arrays | named


def _look_up(name: str, kwargs: dict[str, Any], key: str, choices: Any) -> Any:
    given = kwargs[key]
    if not isinstance(given, str) or given not in choices:
        raise UsageError(f"jaxmarl/{name} has no {key} {given!r}: {nearest(given, choices, 40)}")
    return choices[given]


def _split_reward(reward: Any, agents: dict[str, Any]) -> dict[str, Any]:
    """Rewards by agent, from a dict by JaxMARL's ids, or in the order of the agents."""
    if isinstance(reward, dict):
        return {agent: reward[inner] for agent, inner in agents.items()}
    return {agent: reward[index] for index, agent in enumerate(agents)}


def _discrete(built: Built) -> bool:
    return all(isinstance(space, Discrete) for space in built.action_spaces.values())


def _float(x: Any) -> jax.Array:
    return jax.lax.convert_element_type(x, jnp.float32)


def _strong(x: Any) -> jax.Array:
    """The same array without a weak type, which would compile a second step."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return jax.lax.convert_element_type(x, x.dtype)
