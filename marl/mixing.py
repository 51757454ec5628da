"""Value decomposition: one action value for a reward team, mixed from its members' own.

VDN (Sunehag et al. 2018, arXiv:1706.05296) adds them up; QMIX (Rashid et al. 2018,
arXiv:1803.11485) mixes them by a network that is monotonic in each and reads the state. Members may
be in several groups; an agent alone in its team is learned as if there were no mixer. Values of
inactive agents enter as 0.

Axes: M samples, S sharing sets of N members, n members of a reward team.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from marl.agents import networks
from marl.agents.optimizer import NetworkState, make_optimizer, step_network
from marl.envs import spaces
from marl.groups import Group

if TYPE_CHECKING:
    from marl.dispatch import TeamSpec

MIXERS = ("none", "vdn", "qmix")


class MixerState(NamedTuple):
    """Of one reward team; () under VDN and of an agent alone."""

    network: NetworkState
    target_params: Any  # like network.params, or () where the learners have no target


class Mixed(NamedTuple):
    """What of a team is mixed; static."""

    groups: tuple[int, ...]  # indices of the groups
    teams: tuple[tuple[int, ...], ...]  # positions of the members of each reward team
    networks: tuple[Any, ...]  # per team, its mixing network, or None for a sum


def mixed(spec: "TeamSpec", built: tuple[Group, ...]) -> Mixed:
    """The groups of value-based learners, and the reward teams that they make up."""
    found = tuple(i for i, group in enumerate(built) if group.learner.q_values is not None)
    positions = {position for index in found for position in built[index].positions}
    teams = tuple(m for m in spec.reward_teams.members if positions.issuperset(m))
    return Mixed(found, teams, tuple(_network(spec, members) for members in teams))


def _network(spec: "TeamSpec", members: tuple[int, ...]) -> Any:
    if spec.mixer != "qmix" or len(members) == 1:
        return None
    return networks.make_mixer(len(members))


def init(
    spec: "TeamSpec", built: tuple[Group, ...], key: jax.Array, hparams: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Per mixed team, a `MixerState` or ()."""
    parts = mixed(spec, built)
    states: list[Any] = []
    for network, members in zip(parts.networks, parts.teams, strict=True):
        if network is None:
            states.append(())
            continue
        own = of_member(built, hparams, members[0])
        zeros = jnp.zeros((1, _state_size(spec, members)))
        params = network.init(
            jax.random.fold_in(key, members[0]), jnp.zeros((1, len(members))), zeros
        )
        optimizer = make_optimizer(own, own.learning_rate).init(params)
        has_target = spec.replay is not None
        target = jax.tree.map(jnp.copy, params) if has_target else ()
        states.append(MixerState(NetworkState(params, optimizer), target))
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


def of_member(built: tuple[Group, ...], hparams: tuple[Any, ...], position: int) -> Any:
    """The hparams [] of one agent."""
    for group, own in zip(built, hparams, strict=True):
        for index, members in enumerate(group.sets):
            if position in members:
                return jax.tree.map(lambda x, i=index: x[i], own)
    raise AssertionError(f"no group holds position {position}")


def totals(
    parts: Mixed, mixers: Sequence[Any], values: Any, active: jax.Array, state: Sequence[Any]
) -> jax.Array:
    """[teams, M]: the mixed values of [M] by position; `mixers` are parameters, or ()."""

    def total(network: Any, params: Any, members: tuple[int, ...], read: Any) -> jax.Array:
        own = jnp.stack([jnp.where(active[p], values[p], 0.0) for p in members], -1)
        return jnp.sum(own, -1) if network is None else network.apply(params, own, read)

    return jnp.stack(
        [total(*of) for of in zip(parts.networks, mixers, parts.teams, state, strict=True)]
    )


def step(
    built: tuple[Group, ...],
    hparams: tuple[Any, ...],
    members: tuple[int, ...],
    mixer: Any,
    grads: Any,
) -> Any:
    """With the hparams of the team's first member."""
    if mixer == ():
        return mixer
    own = of_member(built, hparams, members[0])
    network = step_network(mixer.network, grads, own, own.learning_rate)
    if mixer.target_params == ():
        return mixer._replace(network=network)
    target = optax.incremental_update(network.params, mixer.target_params, own.tau)
    return MixerState(network, target)
