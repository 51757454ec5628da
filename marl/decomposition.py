"""Updates of value decomposition: the gradient goes through a mixer to every member's values.

Axes: M samples, S sharing sets of N members.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from marl import experience, groups, learning, member_values, mixing
from marl.agents import losses, q_learning, returns, sequences
from marl.agents.minibatches import permutations
from marl.agents.q_learning import Memories
from marl.experience import TeamRollout
from marl.groups import Group
from marl.member_values import Taken, View
from marl.mixing import Mixed

if TYPE_CHECKING:
    from marl.dispatch import TeamSpec


class Samples(NamedTuple):
    """What a gradient step learns from; the L steps of M sequences are L * M samples here."""

    own: tuple[Taken, ...]  # per mixed group, [S, ...]
    active: jax.Array  # [A, M] bool
    state: Any  # per mixed team, [M, D] what its mixer reads
    target: jax.Array  # [teams, M]
    weight: jax.Array  # [teams, M]


def _loss(
    built: tuple[Group, ...], parts: Mixed, params: Any, samples: Samples
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Half the squared error, summed over teams; with the errors and totals [teams]."""
    own, mixers = params
    values = [
        member_values.taken(built[index], group_params, taken)
        for index, group_params, taken in zip(parts.groups, own, samples.own, strict=True)
    ]
    by_position = member_values.by_position(built, parts, values)
    total = mixing.totals(parts, mixers, by_position, samples.active, samples.state)
    error = jnp.where(samples.weight > 0, total - samples.target, 0.0)
    mean = jax.vmap(losses.weighted_mean)
    loss = mean(0.5 * jnp.square(error), samples.weight)
    return jnp.sum(loss), (loss, mean(total, samples.weight))


def _step(
    spec: "TeamSpec",
    built: tuple[Group, ...],
    parts: Mixed,
    hparams: tuple[Any, ...],
    env_steps: jax.Array,
    carry: tuple[Any, Any],
    samples: Samples,
) -> tuple[tuple[Any, Any], Any]:
    """One gradient step of all mixed groups and their mixers; metrics per group, [S]."""
    state, mixers = carry
    own = tuple(state[index].network.params for index in parts.groups)
    own_mixers = tuple(
        mixers[index].network.params if mixers[index] != () else () for index in parts.indices
    )
    (own_grads, mixer_grads), (loss, total) = jax.grad(partial(_loss, built, parts), has_aux=True)(
        (own, own_mixers), samples
    )
    states = list(state)
    metrics: list[dict[str, jax.Array]] = [{} for _ in built]
    for index, grads in zip(parts.groups, own_grads, strict=True):
        group = built[index]
        config = spec.agents[group.positions[0]].config

        def apply(state, grads, hparams, group=group, config=config):
            rate = q_learning.learning_rate(config, hparams, env_steps)
            found = {
                "grad_norm": optax.tree.norm(grads),
                "learning_rate": rate,
                "epsilon": q_learning.epsilon(hparams, env_steps),
            }
            apply_gradients: Any = group.learner.apply_gradients
            return apply_gradients(state, grads, hparams, rate), found

        args = (state[index], grads, hparams[index])
        states[index], found = groups.over_sets(group, apply, (0, 0, 0), *args)
        team_of = [mixing.team_of(parts, members[0]) for members in group.sets]
        metrics[index] = found | {
            "loss": loss[jnp.asarray(team_of)],
            "q_mean": total[jnp.asarray(team_of)],
        }
    stepped = list(mixers)
    for index, members, grads in zip(parts.indices, parts.teams, mixer_grads, strict=True):
        if grads != ():
            stepped[index] = _mixer_step(
                spec, built, hparams, env_steps, states, members, mixers[index], grads
            )
    return (tuple(states), tuple(stepped)), tuple(metrics)


def _mixer_step(
    spec: "TeamSpec",
    built: tuple[Group, ...],
    hparams: tuple[Any, ...],
    env_steps: jax.Array,
    states: Sequence[Any],
    members: tuple[int, ...],
    mixer: mixing.MixerState,
    grads: Any,
) -> mixing.MixerState:
    """With hparams, learning rate and moves of the target network of the team's first member."""
    config = spec.agents[members[0]].config
    own = groups.of_position(built, hparams, members[0])
    rate = q_learning.learning_rate(config, own, env_steps)
    moves = jnp.bool_(True)
    if mixer.target_params != ():
        steps = groups.of_position(built, tuple(states), members[0]).steps
        moves = steps % config.target_update_interval == 0
    return mixing.step(mixer, grads, own, rate, moves)


def _next_totals(
    spec: "TeamSpec",
    built: tuple[Group, ...],
    parts: Mixed,
    state: tuple[Any, ...],
    mixers: tuple[Any, ...],
    view: View,
    memories: Sequence[Memories],
    rollout: TeamRollout,
) -> jax.Array:
    """[teams, T, B]: what each team's greedy actions are worth where each step led to."""
    values = [
        member_values.following(
            built[index],
            getattr(spec.agents[built[index].positions[0]].config, "double", False),
            state[index],
            own,
            memory,
        )
        for index, own, memory in zip(parts.groups, view.own, memories, strict=True)
    ]
    params = tuple(
        () if x == () else (x.network.params if x.target_params == () else x.target_params)
        for x in (mixers[index] for index in parts.indices)
    )
    by_position = member_values.by_position(built, parts, values)
    active = _by_agent(rollout.final_active)
    total = mixing.totals(parts, params, by_position, active, view.final_state)
    return total.reshape(-1, *rollout.episode_over.shape)


def replay_step(
    spec: "TeamSpec",
    built: tuple[Group, ...],
    state: tuple[Any, ...],
    mixers: tuple[Any, ...],
    rollout: TeamRollout,
    hparams: tuple[Any, ...],
) -> tuple[tuple[Any, Any], Any]:
    """One gradient step on B windows of T steps: ((states, mixers), metrics)."""
    carry: tuple[Any, Any] = state, mixers
    metrics: tuple[dict[str, jax.Array], ...] = tuple({} for _ in built)
    for parts in mixing.alike(spec, built, on_replay=True):
        carry, found = _learn_windows(spec, built, parts, carry, rollout, hparams)
        metrics = tuple(a | b for a, b in zip(metrics, found, strict=True))
    return carry, metrics


def _learn_windows(
    spec: "TeamSpec",
    built: tuple[Group, ...],
    parts: Mixed,
    carry: tuple[Any, Any],
    rollout: TeamRollout,
    hparams: tuple[Any, ...],
) -> tuple[tuple[Any, Any], Any]:
    """`replay_step` of teams that learn from the first steps of windows, or from sequences."""
    first, length, group = 0, 1, built[parts.groups[0]]
    if learning.remembers(group):
        config = spec.agents[group.positions[0]].config
        first, length = config.burn_in, config.sequence_length
    which = slice(first, first + length)
    window = learning.window_of(spec, group.learner.window, rollout)
    rollout = experience.shortened(rollout, window)
    view = member_values.view(spec, built, parts, rollout)
    memories = _memories(built, parts, carry[0], view, rollout)
    following = _next_totals(spec, built, parts, *carry, view, memories, rollout)
    targets = []
    for members, value in zip(parts.teams, following, strict=True):
        reward, terminated, truncated = (x[first:, members[0]] for x in view.result)
        gamma = groups.of_position(built, hparams, members[0]).gamma
        target = returns.n_steps(reward, value[first:], terminated, truncated, gamma, length)
        targets.append(target.reshape(-1))
    num_envs = following.shape[-1]
    samples = Samples(
        own=tuple(
            member_values.of_windows(built[index], which, own, rollout.reset, memory)
            for index, own, memory in zip(parts.groups, view.own, memories, strict=True)
        ),
        active=_by_agent(rollout.active[which]),
        state=jax.tree.map(lambda x: x[first * num_envs :][: length * num_envs], view.state),
        target=jnp.stack(targets),
        weight=mixing.weights(parts, _by_agent(experience.learned_from(rollout)[which])),
    )
    return _step(spec, built, parts, hparams, rollout.env_steps, carry, samples)


def _memories(
    built: tuple[Group, ...], parts: Mixed, state: Sequence[Any], view: View, rollout: TeamRollout
) -> list[Memories]:
    """Per mixed group, what its networks remember after each step."""
    return [
        member_values.memories(built[index], state[index], own, rollout.reset)
        for index, own in zip(parts.groups, view.own, strict=True)
    ]


def update(
    spec: "TeamSpec",
    built: tuple[Group, ...],
    key: jax.Array,
    state: tuple[Any, ...],
    mixers: tuple[Any, ...],
    rollout: TeamRollout,
    hparams: tuple[Any, ...],
) -> tuple[tuple[Any, Any], Any]:
    """Epochs of minibatches on Q(lambda) targets (PQN): ((states, mixers), metrics)."""
    key_shuffle = jax.random.split(key)[1]  # the team's, as learners without a mixer have it
    carry: tuple[Any, Any] = state, mixers
    metrics: tuple[dict[str, jax.Array], ...] = tuple({} for _ in built)
    for parts in mixing.alike(spec, built, on_replay=False):
        learn = partial(_learn_alike, spec, built, parts, key_shuffle)
        carry, found = learn(carry, rollout, hparams)
        metrics = tuple(a | b for a, b in zip(metrics, found, strict=True))
    return carry, metrics


def _learn_alike(
    spec: "TeamSpec",
    built: tuple[Group, ...],
    parts: Mixed,
    key_shuffle: jax.Array,
    carry: tuple[Any, Any],
    rollout: TeamRollout,
    hparams: tuple[Any, ...],
) -> tuple[tuple[Any, Any], Any]:
    """`update` of teams whose rollouts are cut alike: into steps, or with memory into sequences."""
    view = member_values.view(spec, built, parts, rollout)
    memories = _memories(built, parts, carry[0], view, rollout)
    following = _next_totals(spec, built, parts, *carry, view, memories, rollout)
    active = _by_agent(rollout.active)
    configs = [spec.agents[built[index].positions[0]].config for index in parts.groups]
    own_samples = (
        member_values.sampled(built[index], config, own, rollout.reset, memory)
        for index, config, own, memory in zip(
            parts.groups, configs, view.own, memories, strict=True
        )
    )
    targets = _lambda_targets(built, parts, view, following, hparams)
    weight = mixing.weights(parts, active)
    samples = Samples(tuple(own_samples), active, view.state, targets, weight)
    length, num_envs = rollout.reset.shape
    config, own_length = configs[0], 1
    if learning.remembers(built[parts.groups[0]]):
        own_length = config.sequence_length or length
    # where each step of each sequence stands among the steps [T * B]
    places = sequences.cut(own_length, jnp.arange(length * num_envs).reshape(length, num_envs))
    orders = permutations(key_shuffle, config.num_epochs, places.shape[1])
    indices = orders.reshape(config.num_epochs * config.num_minibatches, -1)
    step = partial(_minibatch_step, spec, built, parts, hparams, rollout.env_steps, samples, places)
    carry, metrics = jax.lax.scan(step, carry, indices)
    return carry, jax.tree.map(lambda x: jnp.mean(x, 0), metrics)


def _lambda_targets(
    built: tuple[Group, ...],
    parts: Mixed,
    view: View,
    following: jax.Array,
    hparams: tuple[Any, ...],
) -> jax.Array:
    """[teams, T * B]: Q(lambda) returns, from `_next_totals`."""
    targets = []
    for members, value in zip(parts.teams, following, strict=True):
        own = groups.of_position(built, hparams, members[0])
        reward, terminated, truncated = (x[:, members[0]] for x in view.result)
        target = returns.q_lambda(reward, value, terminated, truncated, own.gamma, own.q_lambda)
        targets.append(target.reshape(-1))
    return jnp.stack(targets)


def _by_agent(x: jax.Array) -> jax.Array:
    """[T, A, B] to [A, T * B]."""
    return jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1)


def _minibatch_step(
    spec: "TeamSpec",
    built: tuple[Group, ...],
    parts: Mixed,
    hparams: tuple[Any, ...],
    env_steps: jax.Array,
    samples: Samples,
    places: jax.Array,
    carry: tuple[Any, Any],
    indices: jax.Array,
) -> tuple[tuple[Any, Any], Any]:
    """A step on the samples with `indices`, whose steps stand at `places` [L, M] in a rollout."""
    at = places[:, indices].reshape(-1)
    batch = Samples(
        own=tuple(
            member_values.selected(built[index], own, indices)
            for index, own in zip(parts.groups, samples.own, strict=True)
        ),
        active=samples.active[:, at],
        state=jax.tree.map(lambda x: x[at], samples.state),
        target=samples.target[:, at],
        weight=samples.weight[:, at],
    )
    return _step(spec, built, parts, hparams, env_steps, carry, batch)
