"""The compiled programs of a run, memoised on what is static about it."""

import time
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from marl import learning, replay, reward_scaling, rewards, rollout, xla
from marl.dispatch import TeamSpec, lift
from marl.envs.vector import VectorEnv
from marl.episodes import Episodes
from marl.rollout import Carry, Faults
from marl.update import TeamState, update

# a program that runs once is not worth optimising: half its compile time
_RUNS_ONCE: dict[str, Any] = {"xla_backend_optimization_level": 0}


class RunState(NamedTuple):
    """Everything that training goes on from. Leads with [seeds] when a run has several."""

    key: jax.Array  # [] the run's one key; what is drawn in an update is folded from its number
    update: jax.Array  # [] int32: updates done
    team: Any  # learner states per group, [S, ...], then those of critics that the team holds
    hparams: Any  # per group, [S]; then `RewardHparams` where `Terms` are on
    carry: Carry
    replay: Any = ()  # state of the replay buffer, or () without one
    mixers: Any = ()  # per reward team, its mixing network; () without mixers
    critic_memory: Any = ()  # per group, critics' at the last rollout's end; () without any
    returns: Any = ()  # per reward team, by which rewards are normalised; () where they are not


class RewardMetrics(NamedTuple):
    """What rewards were learned with in one update; () of `Terms` that are off."""

    shaped_weight: Any = ()  # []
    return_std: Any = ()  # [teams]


class Metrics(NamedTuple):
    """Of one update."""

    learner: Any  # per group, dicts of [S]
    episodes: Episodes
    faults: Faults  # what was not finite in its rollout
    finite: Any  # per group, [S] bool: whether the update was finite
    rewards: RewardMetrics


class ProgramSpec(NamedTuple):
    """What a compiled training program depends on; hashable."""

    env: Any
    team: TeamSpec
    num_envs: int
    rollout_length: int
    reset_pool: int
    num_seeds: int
    max_updates: int  # most updates of one chunk
    skip_nan: bool = False  # undo the updates of agents that were not finite

    @classmethod
    def of(cls, team: Any, settings: Any) -> "ProgramSpec":
        """For a `Team`, and the numbers of `marl.train` or a configuration's section `training`."""
        return cls(
            env=team.env,
            team=team.spec,
            num_envs=settings.num_envs,
            rollout_length=settings.rollout_length,
            reset_pool=settings.reset_pool,
            num_seeds=settings.num_seeds,
            max_updates=settings.log_interval,
            skip_nan=settings.on_nan == "skip",
        )


class Timings(NamedTuple):
    """CPU seconds."""

    trace: float
    compile: float


class Program:
    """Training of one `ProgramSpec`: `init`, and `chunk` of up to `max_updates` updates."""

    def __init__(self, spec: ProgramSpec):
        self.spec = spec
        self._init: Any = None
        self._chunk: Any = None

    @property
    def is_compiled(self) -> bool:
        return self._chunk is not None

    def compile(self, keys: jax.Array, hparams: Any) -> Timings:
        """Compile both functions for the arguments of `init`."""
        started = time.process_time()
        lowered_init = jax.jit(self.init_function).lower(keys, hparams)
        state = jax.eval_shape(self.init_function, keys, hparams)
        chunk = jax.jit(partial(_chunk, self.spec), donate_argnums=0)
        lowered_chunk = chunk.lower(state, jnp.int32(0))
        traced = time.process_time()
        options = xla.compiler_options()
        self._init = lowered_init.compile(options | _RUNS_ONCE)
        self._chunk = lowered_chunk.compile(options)
        return Timings(traced - started, time.process_time() - traced)

    def init(self, keys: jax.Array, hparams: Any) -> RunState:
        """A fresh state; `keys` [seeds], `hparams` without the seeds' axis."""
        if not self.is_compiled:
            self.compile(keys, hparams)
        return self._init(keys, hparams)

    def init_function(self, keys: jax.Array, hparams: Any) -> RunState:
        """`init` without compiling: what `jax.eval_shape` takes."""
        if self.spec.num_seeds == 1:
            return init_state(self.spec, keys[0], hparams)
        return jax.vmap(partial(init_state, self.spec), in_axes=(0, None))(keys, hparams)

    def chunk(self, state: RunState, num_updates: int) -> tuple[RunState, Metrics]:
        """`num_updates` updates; of the metrics [max_updates, ...] the first `num_updates` count.

        The state that is passed in is donated.
        """
        assert self._chunk is not None, "init comes before chunk"
        return self._chunk(state, jnp.int32(num_updates))


@lru_cache(maxsize=32)
def program(spec: ProgramSpec) -> Program:
    """The program of `spec`; the same object, and so the same executable, for equal specs."""
    return Program(spec)


def vector_env(spec: ProgramSpec) -> VectorEnv:
    return VectorEnv(spec.env, spec.num_envs, spec.reset_pool)


def init_state(spec: ProgramSpec, key: jax.Array, hparams: Any) -> RunState:
    """The state of one seed."""
    key_init, key_reset, key_run = jax.random.split(key, 3)
    team = lift(spec.team).learner.init(key_init, hparams)
    carry = rollout.start(spec.team, vector_env(spec), key_reset)
    memory = learning.critic_memories(lift(spec.team).groups, spec.num_envs)
    returns = reward_scaling.init(spec.team, spec.num_envs)
    state = RunState(key_run, jnp.int32(0), team, floats(hparams), carry, (), (), memory, returns)
    if spec.team.mixer != "none":
        from marl import mixing  # networks take their time to import

        mixers = mixing.init(spec.team, lift(spec.team).groups, key_init, hparams)
        state = state._replace(mixers=mixers)
    if spec.team.replay is None:
        return state
    rows = jax.eval_shape(partial(_rows, spec), state)
    one = jax.tree.map(lambda x: jnp.zeros(x.shape[2:], x.dtype), rows)
    return state._replace(replay=replay.make_buffer(spec.team.replay, spec.num_envs).init(one))


def floats(hparams: tuple[Any, ...]) -> tuple[Any, ...]:
    """Per group, the hparams without what only `init` reads (see `marl.agents.learner.Given`)."""

    def keep(group: Any) -> Any:
        given = [name for name, x in group._asdict().items() if not jax.tree_util.all_leaves([x])]
        return group._replace(**dict.fromkeys(given, ()))

    return tuple(map(keep, hparams))


def _rows(spec: ProgramSpec, state: RunState) -> Any:
    """What one rollout adds to the replay buffer, [B, T, ...]."""
    return replay.rows_of(_collect(spec, state.key, state.update, state)[1])


def _collect(spec: ProgramSpec, key: jax.Array, number: jax.Array, state: RunState) -> Any:
    env_steps = number.astype(jnp.float32) * (spec.num_envs * spec.rollout_length)
    return rollout.collect(
        spec.team,
        vector_env(spec),
        spec.rollout_length,
        key,
        state.team,
        state.carry,
        env_steps,
        state.hparams,
    )


def train_step(spec: ProgramSpec, number: jax.Array, state: RunState) -> tuple[RunState, Metrics]:
    """One rollout and one update of the team, of one seed.

    `number` [] int32 is `state.update`: apart, because it is one for all seeds that are vmapped.
    """
    key_collect, key_update = jax.random.split(jax.random.fold_in(state.key, number))
    carry, experience, episodes, faults = _collect(spec, key_collect, number, state)
    built = lift(spec.team).groups
    returns, factor = reward_scaling.after(
        spec.team, built, state.returns, experience, state.hparams
    )
    experience = experience._replace(
        update=number, critic_memory=state.critic_memory, reward_factor=factor
    )
    before = TeamState(state.team, state.mixers, state.replay)
    args = key_update, before, experience, state.hparams
    learned = update(spec.team, spec.num_envs, *args, skip_nan=spec.skip_nan)
    team, mixers, rows = learned.state
    num_groups = len(learned.metrics)
    finite = tuple(
        _finite_sets(new) & (_finite_sets(found) | ~counts)
        for new, found, counts in zip(
            team[:num_groups], learned.metrics, learned.counts, strict=True
        )
    )
    if spec.skip_nan:
        held = tuple(_finite_sets(critics) for critics in team[num_groups:])
        kept = zip((*finite, *held), team, state.team, strict=True)
        team = tuple(_where_finite(sets, new, old) for sets, new, old in kept)
        mixers = _whole_or_old(finite, mixers, state.mixers)
    memory = learning.next_critic_memories(spec.team, built, team[:num_groups], experience)
    number = state.update + 1
    state = RunState(state.key, number, team, state.hparams, carry, rows, mixers, memory, returns)
    terms = _terms(spec.team, returns, experience.env_steps, state.hparams)
    return state, Metrics(learned.metrics, episodes, faults, finite, terms)


def _terms(
    spec: TeamSpec, returns: Any, env_steps: jax.Array, hparams: tuple[Any, ...]
) -> RewardMetrics:
    """What this update's rewards were made with, beside what does not change."""
    found = RewardMetrics()
    if spec.terms.shaped:
        weight = rewards.shaped_weight(rewards.of_team(hparams), env_steps)
        found = found._replace(shaped_weight=weight)
    if spec.terms.normalised:
        deviation = reward_scaling.reported(spec, lift(spec).groups, returns, hparams)
        found = found._replace(return_std=deviation)
    return found


def _finite_sets(tree: Any) -> jax.Array:
    """[S] bool: whether everything of a sharing set in leaves [S, ...] is finite."""
    leaves = jax.tree.leaves(tree)
    floats = [x.reshape(x.shape[0], -1) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    if not floats:
        return jnp.ones(leaves[0].shape[0] if leaves else 1, bool)
    return jnp.all(jnp.isfinite(jnp.concatenate(floats, 1)), 1)


def _whole_or_old(finite: tuple[jax.Array, ...], new: Any, old: Any) -> Any:
    """The new mixers, if they and all agents are finite: they move together."""
    leaves = [x for x in jax.tree.leaves(new) if jnp.issubdtype(x.dtype, jnp.floating)]
    whole = [jnp.all(sets) for sets in finite] + [jnp.all(jnp.isfinite(x)) for x in leaves]
    return jax.tree.map(partial(jnp.where, jnp.all(jnp.stack(whole))), new, old)


def _where_finite(finite: jax.Array, new: Any, old: Any) -> Any:
    """`new` [S, ...] of the sets that are finite, `old` of the others."""

    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(finite.reshape(finite.shape + (1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, new, old)


def _step_seeds(spec: ProgramSpec, state: RunState) -> tuple[RunState, Metrics]:
    step = partial(train_step, spec)
    if spec.num_seeds == 1:
        return step(state.update, state)
    return jax.vmap(step, in_axes=(None, 0))(state.update[0], state)


def _chunk(spec: ProgramSpec, state: RunState, num_updates: jax.Array) -> tuple[RunState, Any]:
    """A loop with a traced length, so that chunks of any length are one program.

    Metrics are one vector per update inside the loop: thirty small buffers would be thirty kernels.
    """
    step = partial(_step_seeds, spec)
    shapes = jax.eval_shape(step, state)[1]
    size, unravel = _metrics_vector(shapes)
    rows = jnp.zeros((spec.max_updates, size))

    def body(index: jax.Array, loop: tuple[RunState, jax.Array]) -> tuple[RunState, jax.Array]:
        state, rows = loop
        state, metrics = step(state)
        row = ravel_pytree(jax.tree.map(lambda x: x.astype(jnp.float32), metrics))[0]
        return state, jax.lax.dynamic_update_index_in_dim(rows, row, index, 0)

    state, rows = jax.lax.fori_loop(0, num_updates, body, (state, rows))
    return state, jax.vmap(unravel)(rows)


def _metrics_vector(shapes: Any) -> tuple[int, Any]:
    """Length of the vector of one update's metrics, and the function that takes it apart."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), shapes)
    vector, unravel = ravel_pytree(zeros)

    def restore(row: jax.Array) -> Any:
        return jax.tree.map(lambda x, like: x.astype(like.dtype), unravel(row), shapes)

    return vector.size, restore
