"""Whether an environment keeps the interface's promises, seen from shapes and dtypes alone.

Nothing is computed: everything goes through `jax.eval_shape`, so that mistakes show while an
experiment is built.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from marl.envs import spaces
from marl.envs.errors import UsageError
from marl.envs.interface import TimeStep

METHODS = ("reset", "step", "action_mask", "global_state")
PER_AGENT = ("obs", "reward", "terminated", "truncated", "active", "final_obs")


def missing_members(env: Any) -> list[str]:
    """Names of the interface that `env` lacks.

    An environment without `agents` has a single agent: its spaces may be named `observation_space`
    and `action_space`, and it needs no masks and no global state.
    """
    if not hasattr(env, "agents"):
        missing = [name for name in ("reset", "step") if not callable(getattr(env, name, None))]
        for name in ("observation_space", "action_space"):
            if not (hasattr(env, name) or hasattr(env, f"{name}s")):
                missing.append(name)
        return missing
    missing = [name for name in ("observation_spaces", "action_spaces") if not hasattr(env, name)]
    return missing + [name for name in METHODS if not callable(getattr(env, name, None))]


def validate(env: Any) -> None:
    """Raise UsageError unless `env` (see `naming.by_name`) returns what it declares."""
    if missing := missing_members(env):
        raise UsageError(f"the environment {_name(env)} lacks {', '.join(missing)}")
    _check_agents(env)
    _check_spaces(env)
    key = jax.random.key(0)
    obs, state = _trace("reset", env.reset, key)
    _check_keys("observations of reset", obs, env.agents)
    _check_observations(env, "reset", obs)
    _check_mask(env, _trace("action_mask", env.action_mask, state))
    _trace("global_state", env.global_state, state)
    action = {agent: spaces.shape_dtype(env.action_spaces[agent]) for agent in env.agents}
    result = _trace("step", env.step, key, state, action)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], TimeStep)):
        raise UsageError(
            f"step returned {type(result).__name__}; expected (TimeStep, state), with "
            "marl.envs.interface.TimeStep"
        )
    _check_timestep(env, result[0])
    _check_same("the state that step returns", state, result[1])


def check_hash(env: Any) -> None:
    """Raise UsageError unless `env` is a value."""
    try:
        hash(env)
    except TypeError:
        raise UsageError(
            f"the environment {_name(env)} does not hash; compiled programs are kept by "
            "environment, so make it a value: @dataclass(frozen=True), with tuples for lists"
        ) from None


def _check_agents(env: Any) -> None:
    agents = env.agents
    strings = isinstance(agents, tuple | list) and all(isinstance(a, str) for a in agents)
    if not strings or not agents or len(set(agents)) != len(agents):
        raise UsageError(
            f"the environment has agents = {agents!r}; expected a tuple of distinct strings"
        )


def _check_spaces(env: Any) -> None:
    for name in ("observation_spaces", "action_spaces"):
        declared = getattr(env, name)
        if not hasattr(declared, "keys"):
            raise UsageError(f"{name} is a {type(declared).__name__}; expected a dict by agent id")
        _check_keys(name, declared, env.agents)
        for agent in env.agents:
            try:
                leaves = spaces.leaves(declared[agent])
            except TypeError as error:
                raise UsageError(f"{name}[{agent!r}]: {error}") from None
            if not leaves or any(0 in leaf.shape for leaf in leaves):
                raise UsageError(
                    f"{name}[{agent!r}] = {declared[agent]} has an empty part; drop it"
                )


def _check_keys(what: str, found: Any, agents: Iterable[str]) -> None:
    if not hasattr(found, "keys"):
        raise UsageError(f"{what}: got {type(found).__name__}; expected a dict by agent id")
    agents = list(agents)
    if lacking := [agent for agent in agents if agent not in found]:
        raise UsageError(f"{what}: nothing for agent {', '.join(lacking)}")
    if ghosts := [str(key) for key in found if key not in agents]:
        raise UsageError(
            f"{what}: {', '.join(ghosts)} is not an agent; the agents are {', '.join(agents)}. "
            "Give what belongs to no agent as global_state or info"
        )


def _check_observations(env: Any, what: str, obs: Any) -> None:
    for agent in env.agents:
        declared = env.observation_spaces[agent]
        expected = spaces.shape_dtype(declared)
        if not _alike(expected, obs[agent]):
            raise UsageError(
                f"{what} returns {_text(obs[agent])} as the observation of {agent}, and its space "
                f"is {spaces.describe(declared)}; the two must agree in structure, shape and dtype"
            )


def _check_timestep(env: Any, timestep: TimeStep) -> None:
    for name in PER_AGENT:
        _check_keys(f"{name} of step", getattr(timestep, name), env.agents)
    _check_observations(env, "step", timestep.obs)
    _check_observations(env, "step (final_obs)", timestep.final_obs)
    for agent in env.agents:
        _check_scalar(f"reward of {agent}", timestep.reward[agent], jnp.float32)
        for name in ("terminated", "truncated", "active"):
            _check_scalar(f"{name} of {agent}", getattr(timestep, name)[agent], jnp.bool_)
    _check_scalar("episode_over", timestep.episode_over, jnp.bool_)


def _check_scalar(what: str, found: Any, dtype: Any) -> None:
    if getattr(found, "shape", None) != () or found.dtype != dtype:
        raise UsageError(
            f"step returns {_text(found)} as {what}; expected a scalar {jnp.dtype(dtype).name}"
        )


def _check_mask(env: Any, mask: Any) -> None:
    if mask is None:
        return
    _check_keys("action_mask", mask, env.agents)
    for agent in env.agents:
        expected = spaces.map_spaces(_mask_of, env.action_spaces[agent])
        if not _alike(expected, mask[agent]):
            raise UsageError(
                f"action_mask gives {_text(mask[agent])} to {agent}, whose actions are "
                f"{spaces.describe(env.action_spaces[agent])}; expected {_text(expected)}"
            )


def _mask_of(space: spaces.Space) -> jax.ShapeDtypeStruct | None:
    if isinstance(space, spaces.Box):
        return None
    size = space.n if isinstance(space, spaces.Discrete) else sum(space.nvec)
    return jax.ShapeDtypeStruct((size,), jnp.bool_)


def _check_same(what: str, expected: Any, found: Any) -> None:
    if _alike(expected, found):
        return
    raise UsageError(
        f"{what} differs from the one it was given, and a compiled loop needs them equal: "
        f"{_difference(expected, found)}"
    )


def _difference(expected: Any, found: Any) -> str:
    before, after = jax.tree.structure(expected), jax.tree.structure(found)
    if before != after:
        return f"structure {before} against {after}"
    pairs = zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True)
    different = [
        f"{jax.tree_util.keystr(path)} is {_text(a)}, then {_text(b)}"
        for (path, a), b in pairs
        if not _alike(a, b)
    ]
    return "; ".join(different[:4])


def _alike(expected: Any, found: Any) -> bool:
    """Equal structure, shapes and dtypes."""
    if jax.tree.structure(expected) != jax.tree.structure(found):
        return False
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True)
    return all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)


def _trace(what: str, function: Any, *args: Any) -> Any:
    try:
        return jax.eval_shape(function, *args)
    except Exception as error:
        raise UsageError(
            f"the environment's {what} cannot be traced by JAX: {type(error).__name__}: {error}"
        ) from error


def _text(tree: Any) -> str:
    """Shapes and dtypes for people: `float32[4]`."""
    return str(jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)).replace("'", "")


def _name(env: Any) -> str:
    return type(env).__name__
