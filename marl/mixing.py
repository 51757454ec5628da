"""Value decomposition: one action value for a reward team, mixed from its members' own.

VDN (Sunehag et al. 2018, arXiv:1706.05296) adds them up; QMIX (Rashid et al. 2018,
arXiv:1803.11485) mixes them by a network that is monotonic in each and reads the state. Members may
be in several groups; an agent alone in its team is learned as if there were no mixer. Values of
inactive agents enter as 0.

Axes: M samples, S sharing sets of N members, n members of a reward team.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from marl import groups, learning
from marl.agents import networks
from marl.agents.optimizer import NetworkState, make_optimizer, step_network
from marl.envs import spaces
from marl.groups import Group

if TYPE_CHECKING:
    from marl.dispatch import TeamSpec


class MixerState(NamedTuple):
    """Of one reward team; () under VDN, of an agent alone, and where nothing is mixed."""

    network: NetworkState
    target_params: Any  # like network.params, or () where the learners have no target


class Mixed(NamedTuple):
    """What of a team is mixed and learned together; static."""

    groups: tuple[int, ...]  # indices of the groups
    indices: tuple[int, ...]  # of the reward teams that they make up
    teams: tuple[tuple[int, ...], ...]  # positions of the members of each of them
    networks: tuple[Any, ...]  # per team, its mixing network, or None for a sum


def mixed(spec: "TeamSpec", built: tuple[Group, ...], on_replay: bool) -> Mixed:
    """The groups of value-based learners, on replay or on rollouts, and their reward teams."""
    found = tuple(
        index
        for index, group in enumerate(built)
        if learning.has_values(group) and learning.on_replay(group) == on_replay
    )
    return _of_groups(spec, built, found)


def alike(spec: "TeamSpec", built: tuple[Group, ...], on_replay: bool) -> tuple[Mixed, ...]:
    """What is mixed, by the steps it is learned from: the members of a team agree in those."""
    cuts: dict[Any, list[int]] = {}
    for index in mixed(spec, built, on_replay).groups:
        config = spec.agents[built[index].positions[0]].config
        options = (getattr(config, name, None) for name in learning.CUT)
        cuts.setdefault((learning.remembers(built[index]), *options), []).append(index)
    return tuple(_of_groups(spec, built, tuple(found)) for found in cuts.values())


def _of_groups(spec: "TeamSpec", built: tuple[Group, ...], found: tuple[int, ...]) -> Mixed:
    positions = {position for index in found for position in built[index].positions}
    every = spec.reward_teams.members
    indices = tuple(i for i, members in enumerate(every) if positions.issuperset(members))
    teams = tuple(every[i] for i in indices)
    return Mixed(found, indices, teams, tuple(_network(spec, members) for members in teams))


def _network(spec: "TeamSpec", members: tuple[int, ...]) -> Any:
    if spec.mixer != "qmix" or len(members) == 1:
        return None
    return networks.make_mixer(len(members))


def init(
    spec: "TeamSpec", built: tuple[Group, ...], key: jax.Array, hparams: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Per reward team, a `MixerState`, or () where no network mixes it."""
    states: list[Any] = [()] * len(spec.reward_teams.members)
    for on_replay in (False, True):
        parts = mixed(spec, built, on_replay)
        for index, network, members in zip(parts.indices, parts.networks, parts.teams, strict=True):
            if network is None:
                continue
            own = groups.of_position(built, hparams, members[0])
            zeros = jnp.zeros((1, _state_size(spec, members)))
            params = network.init(
                # keys below the number of agents are their learners'
                jax.random.fold_in(key, len(spec.agents) + members[0]),
                jnp.zeros((1, len(members))),
                zeros,
            )
            optimizer = make_optimizer(own, own.learning_rate).init(params)
            target = jax.tree.map(jnp.copy, params) if on_replay else ()
            states[index] = MixerState(NetworkState(params, optimizer), target)
    return tuple(states)


def _state_size(spec: "TeamSpec", members: Sequence[int]) -> int:
    """Length of what a mixer reads."""
    if spec.state is not None:
        read = [spaces.from_signature(spec.state)]
    else:
        read = [spaces.from_signature(spec.agents[p].observation) for p in members]
    zeros = [networks.zero_features(space, "flatten").vector for space in read]
    return sum(x.shape[-1] for x in zeros)


def states(
    spec: "TeamSpec", members: Sequence[int], observations: Sequence[Any], global_state: Any
) -> jax.Array:
    """What a mixer reads, [T * B, D]: the global state, else the members' observations."""
    if spec.state is not None:
        read = [(spaces.from_signature(spec.state), global_state)]
    else:
        read = [
            (spaces.from_signature(spec.agents[p].observation), observations[p]) for p in members
        ]
    vectors = [networks.features(space, x, "flatten").vector for space, x in read]
    joint = jnp.concatenate(vectors, -1)
    return joint.reshape(-1, joint.shape[-1])


def totals(
    parts: Mixed, mixers: Sequence[Any], values: Any, active: jax.Array, state: Sequence[Any]
) -> jax.Array:
    """[teams, M]: the mixed values of [M] by position; `mixers` are parameters, or ()."""

    def total(network: Any, params: Any, members: tuple[int, ...], read: Any) -> jax.Array:
        if len(members) == 1:
            return values[members[0]]  # without a mixer nobody's value is 0 for being away
        own = jnp.stack([jnp.where(active[p], values[p], 0.0) for p in members], -1)
        return jnp.sum(own, -1) if network is None else network.apply(params, own, read)

    return jnp.stack(
        [total(*of) for of in zip(parts.networks, mixers, parts.teams, state, strict=True)]
    )


def step(
    mixer: MixerState, grads: Any, hparams: Any, learning_rate: jax.Array, moves: jax.Array
) -> MixerState:
    """One optimiser step.

    Args:
      mixer: the state of one team.
      grads: like `mixer.network.params`.
      hparams: of the team's first member.
      learning_rate: [] float.
      moves: [] bool, the target follows now.
    """
    network = step_network(mixer.network, grads, hparams, learning_rate)
    if mixer.target_params == ():
        return mixer._replace(network=network)
    moved = optax.incremental_update(network.params, mixer.target_params, hparams.tau)
    target = jax.tree.map(partial(jnp.where, moves), moved, mixer.target_params)
    return MixerState(network, target)


def team_of(parts: Mixed, position: int) -> int:
    """Number of the mixed team of the agent at `position`."""
    return next(i for i, members in enumerate(parts.teams) if position in members)


def weights(parts: Mixed, active: jax.Array) -> jax.Array:
    """[teams, M]: 1 where a member is active."""
    alive = [jnp.any(jnp.stack([active[p] for p in members]), 0) for members in parts.teams]
    return jnp.stack(alive).astype(jnp.float32)
