"""Evaluation: whole episodes, a fixed number from each parallel environment.

Counting the first n episodes to finish would favour short ones; here every environment contributes
the same number, however long they take. Returns are sums of raw rewards: of each agent its own, of
a reward team the pooled ones.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from marl import episodes, rollout, xla
from marl.agents.learner import ActFn, ActInput, ActOutput
from marl.agents.validation import at_least, one_of
from marl.dispatch import TeamSpec, lift
from marl.envs.vector import VectorEnv
from marl.episodes import Ended
from marl.rollout import Carry

MODES = ("stochastic", "greedy")
_MOST_ENVS = 128


class _Loop(NamedTuple):
    carry: Carry
    record: Ended  # [B, episodes per environment, ...]
    finished: jax.Array  # [B] episodes
    step: jax.Array  # []


class _Spec(NamedTuple):
    env: Any
    team: TeamSpec
    num_envs: int
    per_env: int


def evaluate(
    env: Any,
    team: TeamSpec,
    state: Any,
    hparams: Any,
    *,
    episodes: int,
    key: jax.Array,
    mode: str = "stochastic",
    max_steps: int = 100_000,
) -> dict[str, Any]:
    """Play whole episodes with a team of one seed.

    Args:
      env: the environment.
      team: the team's spec.
      state, hparams: of the team, without a seeds' axis.
      episodes: at least this many; rounded up to a multiple of the parallel environments.
      key: of the environments and of stochastic actions.
      mode: "stochastic" or "greedy".
      max_steps: steps after which episodes that still run are given up and counted as unfinished.

    Returns:
      A dict of plain numbers: `episodes`, `unfinished`, `length`, `returns` by agent,
      `team_returns` by reward team of more than one agent, `success` where the environment knows
      it, `shaped_returns` by agent where the team learns from shaped rewards; means with `std` over
      episodes.
    """
    at_least("episodes", episodes, 1)
    one_of("mode", mode, MODES)
    per_env = -(-episodes // _MOST_ENVS)
    num_envs = -(-episodes // per_env)
    spec = _Spec(env, team, num_envs, per_env)
    play = _program(spec)
    record, count = play(key, state, hparams, mode == "greedy", jnp.int32(max_steps))
    done = np.arange(per_env) < np.asarray(count)[:, None]
    record = jax.tree.map(lambda x: np.asarray(x)[done], record)
    return _summary(team, record, done)


@lru_cache(maxsize=32)
def _program(spec: _Spec) -> Any:
    return jax.jit(partial(_play, spec), compiler_options=xla.compiler_options())


def _play(
    spec: _Spec, key: jax.Array, state: Any, hparams: Any, greedy: jax.Array, max_steps: jax.Array
) -> tuple[Ended, jax.Array]:
    """Tables of finished episodes [B, episodes per environment, ...], and how many each has."""
    env = VectorEnv(spec.env, spec.num_envs)
    key_reset, key_steps = jax.random.split(key)
    act = partial(_act, spec.team, greedy)

    def step(carry: Carry, index: jax.Array) -> tuple[Carry, jax.Array, Ended]:
        pair = jax.random.split(jax.random.fold_in(key_steps, index))
        keys = rollout.step_keys(spec.team, env, pair)
        carry, out = rollout.act_and_step(spec.team, env, act, keys, state, carry, hparams)
        episode, ended = episodes.after_step(spec.team, carry.episode, out)
        return carry._replace(episode=episode), out.episode_over, ended

    carry = rollout.start(spec.team, env, key_reset)
    ended = jax.eval_shape(step, carry, jnp.int32(0))[2]
    loop = _Loop(
        carry=carry,
        record=jax.tree.map(
            lambda x: jnp.zeros((spec.num_envs, spec.per_env, *x.shape[1:])), ended
        ),
        finished=jnp.zeros(spec.num_envs, jnp.int32),
        step=jnp.int32(0),
    )

    def unfinished(loop: _Loop) -> jax.Array:
        return jnp.any(loop.finished < spec.per_env) & (loop.step < max_steps)

    def body(loop: _Loop) -> _Loop:
        return _after_step(spec, loop, *step(loop.carry, loop.step))

    loop = jax.lax.while_loop(unfinished, body, loop)
    return loop.record, jnp.minimum(loop.finished, spec.per_env)


def _act(
    team: TeamSpec, greedy: jax.Array, keys: jax.Array, state: Any, inputs: ActInput, hparams: Any
) -> ActOutput:
    """Both modes in one program, so that it compiles once."""
    learner = lift(team).learner

    def without_extras(act: ActFn) -> Callable[[], ActOutput]:
        return lambda: act(keys, state, inputs, hparams)._replace(extras=())

    return jax.lax.cond(greedy, without_extras(learner.act_greedy), without_extras(learner.act))


def _after_step(
    spec: _Spec, loop: _Loop, carry: Carry, episode_over: jax.Array, ended: Ended
) -> _Loop:
    """Note down the episodes that ended."""
    # an environment past its share writes out of bounds, which JAX drops
    place = jnp.where(episode_over, loop.finished, spec.per_env)
    envs = jnp.arange(spec.num_envs)
    record = jax.tree.map(
        lambda table, x: table.at[envs, place].set(x.astype(table.dtype), mode="drop"),
        loop.record,
        ended,
    )
    return _Loop(carry, record, loop.finished + episode_over, loop.step + 1)


def score(result: Mapping[str, Any]) -> float | None:
    """One number for how good a team is: the mean of its agents' returns; None without episodes.

    Where some agents gain what others lose it says nothing, and the last state is as good as any.
    """
    means = [entry["mean"] for entry in result["returns"].values()]
    return None if None in means else float(np.mean(means))


def _summary(team: TeamSpec, record: Ended, done: np.ndarray) -> dict[str, Any]:
    def of(x: Any) -> dict[str, float | None]:
        if not x.size:
            return {"mean": None, "std": None}
        return {"mean": float(x.mean()), "std": float(x.std())}

    teams = team.reward_teams
    result: dict[str, Any] = {
        "episodes": int(done.sum()),
        "unfinished": int(done.size - done.sum()),
        "length": of(record.length),
        "returns": {a.name: of(record.returns[:, i]) for i, a in enumerate(team.agents)},
        "team_returns": {
            name: of(record.team_returns[:, i])
            for i, name in enumerate(teams.names)
            if len(teams.members[i]) > 1
        },
    }
    if jax.tree.leaves(record.success):
        result["success"] = of(record.success)["mean"]
    if jax.tree.leaves(record.shaped_returns):
        shaped = record.shaped_returns
        result["shaped_returns"] = {a.name: of(shaped[:, i]) for i, a in enumerate(team.agents)}
    return result
