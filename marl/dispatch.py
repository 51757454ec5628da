"""The dispatcher: lifts single-agent learners to a learner over all agents of an environment.

    specs -> groups -> team

Agents of equal structure form a group and are vmapped; groups are looped over in Python. What is
equal is decided here, once, from learner, config, spaces and critic space.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax

from marl import critics, groups, learning, team_critics
from marl.agents.learner import ActInput, ActOutput, CriticSpace, Learner
from marl.critics import Scope
from marl.envs import spaces
from marl.experience import GroupSteps
from marl.groups import Group
from marl.replay import Replay
from marl.rewards import RewardTeams, Terms


@dataclass(frozen=True)
class AgentSpec:
    """Everything static about one agent."""

    name: str
    algorithm: Any  # module or object with Config, Hparams and make
    config: Any  # frozen dataclass
    scope: Scope  # what its critic reads
    observation: tuple[Any, ...]  # signature of its observation space, as the environment gives it
    action: tuple[Any, ...]  # signature of its action space


@dataclass(frozen=True)
class TeamSpec:
    """Everything static about a team; compiled programs are memoised on it."""

    agents: tuple[AgentSpec, ...]  # in declared order
    sharing_sets: tuple[tuple[int, ...], ...]  # a partition of the agents, by first position
    reward_teams: RewardTeams
    state: tuple[Any, ...] | None  # signature of the global state's space, where a critic reads it
    agent_ids: bool = True  # add a one-hot of the agent where parameters are shared
    vectorise: bool = True
    mixer: str = "none"  # value decomposition over reward teams
    replay: Replay | None = None  # the buffer, where a learner wants samples of it
    critic_sets: tuple[tuple[int, ...], ...] = ()  # who shares a critic that the team holds
    update_order: str = "simultaneous"  # or "sequential": the agents of a reward team in turn
    terms: Terms = Terms()  # what is learned from beside the rewards as they are

    @property
    def final_masks(self) -> bool:
        """Whether a learner bootstraps from actions, and so asks what is legal in final states."""
        return any(critics.kind(agent.algorithm) != "value" for agent in self.agents)


class Lifted(NamedTuple):
    """A team's groups, and the learner over PyTrees of agents that they make."""

    groups: tuple[Group, ...]
    learner: Learner  # its state has one entry per group, then one per group of critics
    critics: tuple[Group, ...]  # that the team holds, apart from actors
    reasons: tuple[str, ...]  # per group, why it stands apart from the group before it


@lru_cache(maxsize=64)
def lift(spec: TeamSpec) -> Lifted:
    """The team's learner: the same functions as a single agent's, over dicts by agent id."""
    keyed = _keyed(spec, spec.sharing_sets, _actor_key)
    built = tuple(_build_group(spec, sets) for sets in keyed.values())
    keyed_critics = _keyed(spec, spec.critic_sets, _critic_key)
    held = tuple(_build_critics(spec, sets) for sets in keyed_critics.values())
    team = Learner(
        init=partial(_init, built, held),
        initial_memory=partial(_initial_memory, built),
        act=partial(_act, spec, built, "act"),
        act_greedy=partial(_act, spec, built, "act_greedy"),
        update=partial(learning.update, spec, built, held),
    )
    return Lifted(built, team, held, _reasons(list(keyed)))


class _Key(NamedTuple):
    """What the agents of a group have in common."""

    learner: Any
    config: Any
    observation: Any
    action: Any
    critic_input: Any
    sharing_set_size: int
    loop: int  # differs for every set when the team is a Python loop


def _actor_key(spec: TeamSpec, members: tuple[int, ...]) -> _Key:
    agent = spec.agents[members[0]]
    held = _is_held(spec, members[0])
    return _Key(
        agent.algorithm,
        agent.config,
        agent.observation,
        agent.action,
        "held by the team" if held else _critic_input(spec, members),
        len(members),
        0,
    )


def _critic_key(spec: TeamSpec, members: tuple[int, ...]) -> _Key:
    agent = spec.agents[members[0]]
    critic_input = _critic_input(spec, members)
    return _Key(agent.algorithm, agent.config, None, None, critic_input, len(members), 0)


def _keyed(
    spec: TeamSpec, sets: Iterable[tuple[int, ...]], key_of: Callable[..., _Key]
) -> dict[_Key, list[tuple[int, ...]]]:
    """Sets of agents by what makes them one group."""
    keyed: dict[_Key, list[tuple[int, ...]]] = {}
    for index, members in enumerate(sets):
        key = key_of(spec, members)._replace(loop=0 if spec.vectorise else index)
        keyed.setdefault(key, []).append(members)
    return keyed


def _is_held(spec: TeamSpec, position: int) -> bool:
    """Whether the team holds the critic of the agent at `position`."""
    return any(position in members for members in spec.critic_sets)


def _reasons(keys: Sequence[_Key]) -> tuple[str, ...]:
    """In words, what each group differs in from the nearest group before it."""

    def differences(key: _Key, other: _Key) -> list[str]:
        names = [name for name in key._fields if getattr(key, name) != getattr(other, name)]
        return [name.replace("_", " ") for name in names]

    reasons = [""]
    for index, key in enumerate(keys[1:], 1):
        nearest = min((differences(key, other) for other in keys[:index]), key=lambda d: len(d))
        reasons.append(", ".join(nearest))
    return tuple(reasons)


def _own_space(spec: TeamSpec, position: int, set_size: int) -> Any:
    """The observation space a learner sees: identified where parameters are shared."""
    space = spaces.from_signature(spec.agents[position].observation)
    if set_size > 1 and spec.agent_ids:
        return groups.identified_space(space, set_size)
    return space


def _critic_space(spec: TeamSpec, position: int, set_size: int) -> CriticSpace:
    raw = [spaces.from_signature(agent.observation) for agent in spec.agents]
    state = None if spec.state is None else spaces.from_signature(spec.state)
    own = _own_space(spec, position, set_size)
    actions = tuple(
        spaces.from_signature(spec.agents[other].action) for other in _context(spec, position)
    )
    scope = spec.agents[position].scope
    return CriticSpace(critics.observation_space(scope, own, raw, state), actions)


def _context(spec: TeamSpec, position: int) -> tuple[int, ...]:
    """Whose actions an agent's critic reads beside its own."""
    agent = spec.agents[position]
    if critics.kind(agent.algorithm) != "q":
        return ()
    return critics.context_positions(agent.scope, position)


def _critic_input(spec: TeamSpec, members: tuple[int, ...]) -> tuple[Any, ...]:
    """What critics of one group have in common: kinds of sources, and the spaces of these.

    One that reads its own observation stands apart from one that reads another's of equal space.
    """
    space = _critic_space(spec, members[0], len(members))
    scope = spec.agents[members[0]].scope
    kinds = tuple(source if isinstance(source, str) else "agent" for source in scope)
    return kinds, spaces.signature(space.observations), spaces.signature(space.context_actions)


def _build_group(spec: TeamSpec, sets: list[tuple[int, ...]]) -> Group:
    first, set_size = sets[0][0], len(sets[0])
    agent, held = spec.agents[first], _is_held(spec, first)
    learner = agent.algorithm.make(
        agent.config,
        _own_space(spec, first, set_size),
        spaces.from_signature(agent.action),
        None if held else _critic_space(spec, first, set_size),
    )
    contexts = tuple(_context(spec, position) for members in sets for position in members)
    return _group(spec, sets, learner)._replace(contexts=contexts, held=held)


def _build_critics(spec: TeamSpec, sets: list[tuple[int, ...]]) -> Group:
    """A group of critics that the team holds."""
    first, set_size = sets[0][0], len(sets[0])
    agent = spec.agents[first]
    critic = agent.algorithm.make_critic(agent.config, _critic_space(spec, first, set_size))
    return _group(spec, sets, critic)


def _group(spec: TeamSpec, sets: list[tuple[int, ...]], learner: Any) -> Group:
    scopes = tuple(spec.agents[position].scope for members in sets for position in members)
    return Group(
        sets=tuple(sets),
        learner=learner,
        identified=len(sets[0]) > 1 and spec.agent_ids,
        scopes=scopes,
        contexts=((),) * len(scopes),
        joint="self" not in scopes[0] and len(set(scopes)) == 1,
        vectorise=spec.vectorise,
    )


def _init(
    built: tuple[Group, ...],
    held: tuple[Group, ...],
    key: jax.Array,
    hparams: tuple[Any, ...],
) -> tuple[Any, ...]:
    """Per group, states [S, ...]; the key of a set comes from its first member's position."""
    states = []
    for group, group_hparams in zip(built, hparams[: len(built)], strict=True):
        keys = groups.position_keys(key, [members[0] for members in group.sets])
        states.append(groups.over_sets(group, group.learner.init, (0, 0), keys, group_hparams))
    return (*states, *team_critics.init(built, held, key, hparams))


def _initial_memory(built: tuple[Group, ...], batch_size: int) -> tuple[Any, ...]:
    """Per group, memories [S, N, B, ...]."""
    return tuple(learning.memories(group, batch_size) for group in built)


def acting_keys(spec: TeamSpec, key: jax.Array) -> jax.Array:
    """[A]: what a team's `act` takes, by position in `env.agents`."""
    return groups.position_keys(key, range(len(spec.agents)))


def acting_noise(spec: TeamSpec, keys: jax.Array, batch_size: int) -> tuple[Any, ...]:
    """Per group what its learner's `act` draws, [S, N, B, ...], from `acting_keys` [A]."""

    def of_group(group: Group) -> Any:
        if group.learner.draw is None:
            return None
        draw = partial(group.learner.draw, batch_size=batch_size)
        own = groups.take(keys, group.positions).reshape(group.shape)
        return groups.over_sets(group, partial(groups.over_members, group, draw, (0,)), (0,), own)

    return tuple(of_group(group) for group in lift(spec).groups)


def _act(
    spec: TeamSpec,
    built: tuple[Group, ...],
    mode: str,
    keys: jax.Array,
    state: tuple[Any, ...],
    inputs: ActInput,
    hparams: tuple[Any, ...],
) -> ActOutput:
    """Actions by agent id, from `acting_keys` [A].

    `inputs` has observations, masks, memories, noise and who is active per group, [S, N, B, ...];
    extras are the `GroupSteps` of each group, which `update` wants back.
    """
    action: dict[int, Any] = {}
    memories, steps = [], []
    for index, group in enumerate(built):
        group_masks = None if inputs.action_mask is None else inputs.action_mask[index]
        group_keys = groups.take(keys, group.positions).reshape(group.shape)
        obs, memory = inputs.obs[index], inputs.memory[index]
        noise, active = (None if x is None else x[index] for x in (inputs.noise, inputs.active))
        own = inputs._replace(
            obs=obs, action_mask=group_masks, memory=memory, noise=noise, active=active
        )
        out = learning.act_group(group, mode, group_keys, state[index], own, hparams[index])
        action |= groups.unstack(group, out.action)
        memories.append(out.memory)
        stored = memory if learning.on_replay(group) else ()
        steps.append(GroupSteps(obs, out.action, group_masks, out.extras, stored))
    by_id = {agent.name: action[position] for position, agent in enumerate(spec.agents)}
    return ActOutput(by_id, tuple(memories), tuple(steps))
