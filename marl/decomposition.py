"""Updates of value decomposition: the gradient goes through a mixer to every member's values.

Axes: M samples, S sharing sets of N members.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from marl import experience, groups, mixing, rewards
from marl.agents import losses, q_learning, returns
from marl.agents.minibatches import permutations
from marl.experience import Seen, TeamRollout
from marl.groups import Group
from marl.mixing import Mixed, mixed

if TYPE_CHECKING:
    from marl.dispatch import TeamSpec


class Samples(NamedTuple):
    """What a gradient step learns from."""

    obs: Any  # per mixed group, [S, M, N, ...]
    action: Any  # per mixed group, [S, M, N]
    active: jax.Array  # [A, M] bool
    state: Any  # per mixed team, [M, D] what its mixer reads
    target: jax.Array  # [teams, M]
    weight: jax.Array  # [teams, M]


class _View(NamedTuple):
    """A rollout as value decomposition reads it; T * B samples in one axis M."""

    obs: Any  # per mixed group, [S, M, N, ...]
    action: Any
    final_obs: Any
    final_mask: Any
    state: Any  # per mixed team, [M, D], or ()
    final_state: Any
    result: rewards.Outcome  # [T, A, B]


def _view(spec: "TeamSpec", built: tuple[Group, ...], parts: Mixed, rollout: TeamRollout) -> _View:
    observations = experience.by_position(built, [steps.obs for steps in rollout.steps])
    finals = experience.by_position(built, rollout.final_obs)
    result = experience.outcome(spec.reward_teams, rollout)
    own = []
    for index in parts.groups:
        seen = Seen(observations, finals, (), ())
        key = jax.random.key(0)  # nobody draws from it
        found, _ = experience.of_group(built[index], rollout, index, result, seen, key, {})
        own.append(found)
    flat = [partial(_by_sample, built[index]) for index in parts.groups]

    def states(observations: Sequence[Any], global_state: Any) -> tuple[Any, ...]:
        return tuple(
            () if network is None else mixing.states(spec, members, observations, global_state)
            for network, members in zip(parts.networks, parts.teams, strict=True)
        )

    return _View(
        obs=tuple(f(x.obs) for f, x in zip(flat, own, strict=True)),
        action=tuple(f(jax.tree.leaves(x.action)[0]) for f, x in zip(flat, own, strict=True)),
        final_obs=tuple(f(x.final_obs) for f, x in zip(flat, own, strict=True)),
        final_mask=tuple(f(x.final_action_mask) for f, x in zip(flat, own, strict=True)),
        state=states(observations, rollout.global_state),
        final_state=states(finals, rollout.final_global_state),
        result=result,
    )


def _by_sample(group: Group, tree: Any) -> Any:
    """[T, S, B * N, ...] to [S, T * B, N, ...]."""
    num_members = group.shape[1]

    def leaf(x: jax.Array) -> jax.Array:
        x = jnp.swapaxes(x, 0, 1)
        return x.reshape(x.shape[0], -1, num_members, *x.shape[3:])

    return jax.tree.map(leaf, tree)


def _by_position(built: tuple[Group, ...], parts: Mixed, values: Sequence[jax.Array]) -> Any:
    """[S, M, N] of each mixed group to [M] by position."""
    return {
        position: value[s, :, n]
        for index, value in zip(parts.groups, values, strict=True)
        for s, members in enumerate(built[index].sets)
        for n, position in enumerate(members)
    }


def _values(group: Group, function: Any, *args: Any) -> jax.Array:
    """`function` over the sharing sets of a group, [S, M, N]."""
    return groups.over_sets(group, function, (0,) * len(args), *args)


def _q_values(group: Group, params: Any, obs: Any) -> jax.Array:
    assert group.learner.q_values is not None
    return group.learner.q_values(params, obs)


def _next_values(group: Group, double: bool, state: Any, obs: Any, mask: Any) -> jax.Array:
    """[S, M, N]: values of the greedy actions, of the target network where there is one."""

    def value(state: Any, obs: Any, *mask: Any) -> jax.Array:
        online = _q_values(group, state.network.params, obs)
        legal = mask[0] if mask else None
        if not jax.tree.leaves(state.target_params):
            return q_learning.greedy_value(online, legal)
        target = _q_values(group, state.target_params, obs)
        if not double:
            return q_learning.greedy_value(target, legal)
        return q_learning.chosen(target, q_learning.greedy_action(online, legal))

    masks = jax.tree.leaves(mask)
    return _values(group, value, state, obs, *masks)


def _loss(
    built: tuple[Group, ...], parts: Mixed, params: Any, samples: Samples
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Half the squared error, summed over teams; with the errors and totals [teams]."""
    own, mixers = params
    values = []
    for index, group_params, obs, action in zip(
        parts.groups, own, samples.obs, samples.action, strict=True
    ):

        def chosen(params: Any, obs: Any, action: jax.Array, index: int = index) -> jax.Array:
            return q_learning.chosen(_q_values(built[index], params, obs), action)

        values.append(_values(built[index], chosen, group_params, obs, action))
    by_position = _by_position(built, parts, values)
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
    view: _View,
    rollout: TeamRollout,
) -> jax.Array:
    """[teams, T, B]: what each team's greedy actions are worth where each step led to."""
    values = [
        _next_values(
            built[index],
            getattr(spec.agents[built[index].positions[0]].config, "double", False),
            state[index],
            obs,
            mask,
        )
        for index, obs, mask in zip(parts.groups, view.final_obs, view.final_mask, strict=True)
    ]
    params = tuple(
        () if x == () else (x.network.params if x.target_params == () else x.target_params)
        for x in (mixers[index] for index in parts.indices)
    )
    by_position = _by_position(built, parts, values)
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
    parts = mixed(spec, built, on_replay=True)
    view = _view(spec, built, parts, rollout)
    following = _next_totals(spec, built, parts, state, mixers, view, rollout)
    batch = following.shape[-1]
    targets = []
    for members, value in zip(parts.teams, following, strict=True):
        reward, terminated, truncated = (x[:, members[0]] for x in view.result)
        gamma = groups.of_position(built, hparams, members[0]).gamma
        total, discount, last = returns.n_step(reward, terminated, truncated, gamma)
        ahead = value[last, jnp.arange(batch)]
        targets.append(total + jnp.where(discount > 0, discount * ahead, 0.0))
    firsts = Samples(
        obs=jax.tree.map(lambda x: x[:, :batch], view.obs),
        action=jax.tree.map(lambda x: x[:, :batch], view.action),
        active=rollout.active[0],
        state=jax.tree.map(lambda x: x[:batch], view.state),
        target=jnp.stack(targets),
        weight=mixing.weights(parts, experience.learned_from(rollout)[0]),
    )
    return _step(spec, built, parts, hparams, rollout.env_steps, (state, mixers), firsts)


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
    parts = mixed(spec, built, on_replay=False)
    view = _view(spec, built, parts, rollout)
    following = _next_totals(spec, built, parts, state, mixers, view, rollout)
    targets = []
    for members, value in zip(parts.teams, following, strict=True):
        own = groups.of_position(built, hparams, members[0])
        reward, terminated, truncated = (x[:, members[0]] for x in view.result)
        target = returns.q_lambda(reward, value, terminated, truncated, own.gamma, own.q_lambda)
        targets.append(target.reshape(-1))
    active = _by_agent(rollout.active)
    weight = mixing.weights(parts, active)
    samples = Samples(view.obs, view.action, active, view.state, jnp.stack(targets), weight)
    config = spec.agents[built[parts.groups[0]].positions[0]].config
    key_shuffle = jax.random.split(key)[1]  # the team's, as learners without a mixer have it
    orders = permutations(key_shuffle, config.num_epochs, weight.shape[1])
    indices = orders.reshape(config.num_epochs * config.num_minibatches, -1)
    step = partial(_minibatch_step, spec, built, parts, hparams, rollout.env_steps, samples)
    carry, metrics = jax.lax.scan(step, (state, mixers), indices)
    return carry, jax.tree.map(lambda x: jnp.mean(x, 0), metrics)


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
    carry: tuple[Any, Any],
    indices: jax.Array,
) -> tuple[tuple[Any, Any], Any]:
    def second(tree: Any) -> Any:
        return jax.tree.map(lambda x: x[:, indices], tree)

    batch = Samples(
        obs=second(samples.obs),
        action=second(samples.action),
        active=samples.active[:, indices],
        state=jax.tree.map(lambda x: x[indices], samples.state),
        target=samples.target[:, indices],
        weight=samples.weight[:, indices],
    )
    return _step(spec, built, parts, hparams, env_steps, carry, batch)
