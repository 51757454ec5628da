"""`marl.team`: what the user asks for, resolved into a team.

Options are resolved agent by agent: the team's, then every matching override in order; the later
match wins. Floats become hparams, everything else config.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl import critics, patterns
from marl.agents import registry as learners
from marl.agents.learner import Learner
from marl.agents.validation import hparams_in_range, one_of
from marl.dispatch import AgentSpec, Lifted, TeamSpec, lift
from marl.envs import registry as environments
from marl.envs import spaces
from marl.envs.errors import UsageError, nearest
from marl.envs.interface import AutoReset
from marl.rewards import DEATHS, POOLINGS, RewardTeams

_TEAM_OPTIONS = ("learner", "critic", "sharing")


@dataclass(frozen=True)
class Team:
    """All agents of one environment together. Made by `marl.team`; a value, without parameters."""

    env: Any
    spec: TeamSpec
    hparams: tuple[Any, ...]  # per agent in declared order, NamedTuples of floats
    source: Any = None  # the environment as it was given
    request: Any = field(default=None, compare=False)  # the arguments of `team`, for the record

    @property
    def lifted(self) -> Lifted:
        return lift(self.spec)

    @property
    def learner(self) -> Learner:
        """The learner over all agents."""
        return self.lifted.learner

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(agent.name for agent in self.spec.agents)

    def group_hparams(self) -> tuple[Any, ...]:
        """Per group, a NamedTuple of float32 arrays [S]: one value per sharing set."""

        def array(*values: float) -> jax.Array:
            return jnp.asarray(values, jnp.float32)

        return tuple(
            jax.tree.map(array, *(self.hparams[members[0]] for members in group.sets))
            for group in self.lifted.groups
        )

    def agent_state(self, state: tuple[Any, ...], agent: str) -> Any:
        """One agent's learner state out of the team's."""
        position = self.agents.index(agent)
        for group, group_state in zip(self.lifted.groups, state, strict=True):
            for index, members in enumerate(group.sets):
                if position in members:
                    return jax.tree.map(lambda x, i=index: x[i], group_state)
        raise KeyError(agent)

    def describe(self) -> str:
        """The text that `marl describe` prints; compiles nothing."""
        from marl.describe import describe

        return describe(self)


class _Resolved(NamedTuple):
    """One agent's options after all overrides."""

    algorithm: Any
    config: Any
    hparams: Any
    critic: tuple[str, ...]
    sharing: str  # "none", "group", or the name of a set


def team(
    env: Any,
    learner: Any = "ppo",
    *,
    critic: Any = "self",
    sharing: Any = "none",
    reward_teams: Any = "none",
    reward_pooling: str = "mean",
    death: str = "auto",
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    agent_ids: bool = True,
    vectorise: bool = True,
    **learner_options: Any,
) -> Team:
    """Lift learners over all agents of an environment.

    Args:
      env: from `marl.make`, or any object with the interface of `marl.envs.interface`.
      learner: a name ("ppo"), an algorithm (a module or object with Config, Hparams and make), or
        a `Learner`.
      critic: what each critic sees: "self", "all", "state", or a list of agent ids, patterns and
        these words.
      sharing: who shares parameters: "none", "group" (agents of equal structure), or
        `{set_name: [patterns]}`.
      reward_teams: whose rewards are pooled: "none", "all", or `{team_name: [patterns]}`.
      reward_pooling: "mean" or "sum" over a reward team.
      death: whether the return of an agent that is out runs on with its reward team's ("continue")
        or ends ("terminal"); "auto" continues inside a reward team.
      overrides: `{pattern: {option: value}}`, where an option is any of the learner's, or
        `learner`, `critic` or `sharing`. Patterns know `*` and `?`; the later match wins.
      agent_ids: add a one-hot of the agent to observations where parameters are shared.
      vectorise: False builds the same team as a Python loop, for tests and debugging.
      **learner_options: any field of the learner's Config or Hparams.

    Raises:
      UsageError: with what was given, what was expected and what to do.
    """
    request = {
        "learner": learner,
        "learner_options": dict(learner_options),
        "critic": critic,
        "sharing": sharing,
        "reward_teams": reward_teams,
        "reward_pooling": reward_pooling,
        "death": death,
        "overrides": dict(overrides or {}),
        "agent_ids": agent_ids,
        "vectorise": vectorise,
    }
    source, env = env, environments.by_name(env)
    environments.validate(env)
    agents = tuple(env.agents)
    one_of("reward_pooling", reward_pooling, POOLINGS)
    one_of("death", death, DEATHS)
    sharing, named_sets = _named_sets(sharing, agents)
    base = {"learner": learner, "critic": critic, "sharing": sharing, **learner_options}
    resolved = [
        _resolve_agent(agent, agents, base, named_sets.get(agent), overrides or {})
        for agent in agents
    ]
    teams = RewardTeams(*_reward_teams(reward_teams, agents), reward_pooling, death)
    spec = _spec(env, agents, resolved, teams, agent_ids, vectorise)
    hparams = tuple(agent.hparams for agent in resolved)
    return Team(_with_final_extras(env, spec), spec, hparams, source, request)


def same_environment(env: Any, team: Team) -> bool:
    """Whether `team` was made for `env`."""
    return env == team.source or environments.by_name(env) == environments.by_name(team.source)


def _resolve_agent(
    agent: str,
    agents: Sequence[str],
    base: Mapping[str, Any],
    named_set: str | None,
    overrides: Mapping[str, Mapping[str, Any]],
) -> _Resolved:
    options = dict(base)
    if named_set is not None:
        options["sharing"] = named_set
    for pattern, changes in overrides.items():
        if not isinstance(changes, Mapping):
            raise UsageError(
                f"overrides.{pattern} = {changes!r} is not a mapping; "
                "write {option: value}, as in {learning_rate: 1e-3}"
            )
        if agent not in patterns.matching_some(pattern, agents, "overrides: agents"):
            continue
        if "learner" in changes and changes["learner"] != options["learner"]:
            # another learner starts from its own defaults
            options = {name: options[name] for name in _TEAM_OPTIONS}
        options |= changes
    algorithm = _algorithm(options["learner"])
    config, hparams = bind_options(
        algorithm, options["learner"], {k: v for k, v in options.items() if k not in _TEAM_OPTIONS}
    )
    return _Resolved(
        algorithm,
        config,
        hparams,
        critics.parse(options["critic"], "critic", agents),
        str(options["sharing"]),
    )


def _algorithm(learner: Any) -> Any:
    if isinstance(learner, str):
        return learners.algorithm(learner)
    if isinstance(learner, Learner):
        return ReadyLearner(learner)
    missing = [name for name in ("Config", "Hparams", "make") if not hasattr(learner, name)]
    if missing:
        raise UsageError(
            f"learner {learner!r} has no {', '.join(missing)}; give a name, a Learner, or a module "
            "or object with Config, Hparams and make"
        )
    return learner


@dataclass(frozen=True)
class _NoConfig:
    pass


class _NoHparams(NamedTuple):
    pass


@dataclass(frozen=True)
class ReadyLearner:
    """An algorithm around a learner that is already bound to its spaces."""

    learner: Learner
    Config = _NoConfig
    Hparams = _NoHparams

    def make(self, config, observation_space, action_space, critic_space) -> Learner:
        del config, observation_space, action_space, critic_space
        return self.learner


def bind_options(algorithm: Any, name: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Flat options as the algorithm's (config, hparams).

    Raises:
      UsageError: an option is unknown, of the wrong type or out of range.
    """
    fields = {field.name: field for field in dataclasses.fields(algorithm.Config)}
    config, floats = {}, {}
    for option, value in options.items():
        if option in fields:
            config[option] = _config_value(option, value, fields[option])
        elif option in algorithm.Hparams._fields:
            floats[option] = value
        else:
            choices = (*algorithm.Hparams._fields, *fields)
            raise UsageError(
                f"learner {_name(name)} has no option {option!r}; {nearest(option, choices, 40)}"
            )
    hparams = algorithm.Hparams(**floats)
    hparams_in_range(hparams)
    return algorithm.Config(**config), hparams


def _config_value(option: str, value: Any, field: Any) -> Any:
    """`value` as the field's type: lists become tuples, whole floats integers."""
    expected = type(field.default)
    if expected is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(int(v) if isinstance(v, float) and v.is_integer() else v for v in value)
    if expected is int and isinstance(value, float) and value.is_integer():
        return int(value)
    wrong = not isinstance(value, expected) or (expected is int and isinstance(value, bool))
    if wrong and field.default is not dataclasses.MISSING:
        raise UsageError(
            f"{option} = {value!r} is a {type(value).__name__}; "
            f"give a {expected.__name__}, as in {option} = {field.default!r}"
        )
    return value


def _name(learner: Any) -> str:
    return repr(learner if isinstance(learner, str) else getattr(learner, "__name__", learner))


def _named_sets(sharing: Any, agents: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The default sharing of all agents, and the set of each agent that the user named."""
    if isinstance(sharing, str):
        one_of("sharing", sharing, ("none", "group"))
        return sharing, {}
    sets = patterns.partition(sharing, agents, "sharing")
    return "none", {agent: name for name, members in sets.items() for agent in members}


def _reward_teams(
    reward_teams: Any, agents: Sequence[str]
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Names and positions; agents that the user did not name stand alone."""
    if isinstance(reward_teams, str):
        one_of("reward_teams", reward_teams, ("none", "all"))
        sets = {"all": list(agents)} if reward_teams == "all" else {}
    else:
        sets = patterns.partition(reward_teams, agents, "reward_teams")
    taken = {agent for members in sets.values() for agent in members}
    sets |= {agent: [agent] for agent in agents if agent not in taken}
    members = tuple(tuple(agents.index(agent) for agent in found) for found in sets.values())
    return tuple(sets), members


def _spec(
    env: Any,
    agents: tuple[str, ...],
    resolved: Sequence[_Resolved],
    teams: RewardTeams,
    agent_ids: bool,
    vectorise: bool,
) -> TeamSpec:
    observations = [spaces.signature(env.observation_spaces[agent]) for agent in agents]
    actions = [spaces.signature(env.action_spaces[agent]) for agent in agents]
    needs_state = any("state" in agent.critic for agent in resolved)
    state = critics.state_space(env) if needs_state else None
    if needs_state and state is None:
        raise UsageError(
            "critic = 'state' needs a global state and this environment has none; "
            "use critic = 'all', which joins all agents' observations"
        )
    sharing_sets = _sharing_sets(agents, resolved, observations, actions)
    team_of = {p: index for index, members in enumerate(teams.members) for p in members}
    scopes: dict[int, critics.Scope] = {}
    for members in sharing_sets:
        paid_apart = len({team_of[p] for p in members}) > 1
        for p in members:
            scopes[p] = critics.resolve(resolved[p].critic, p, paid_apart, agents, observations)
    return TeamSpec(
        agents=tuple(
            AgentSpec(agent, r.algorithm, r.config, scopes[p], observations[p], actions[p])
            for p, (agent, r) in enumerate(zip(agents, resolved, strict=True))
        ),
        sharing_sets=sharing_sets,
        reward_teams=teams,
        state=None if state is None else spaces.signature(state),
        agent_ids=agent_ids,
        vectorise=vectorise,
    )


def _sharing_sets(
    agents: Sequence[str],
    resolved: Sequence[_Resolved],
    observations: Sequence[Any],
    actions: Sequence[Any],
) -> tuple[tuple[int, ...], ...]:
    """A partition of positions. Members of one set must be alike in everything they learn with."""
    sets: dict[Any, list[int]] = {}
    for p, agent in enumerate(resolved):
        kind = (agent.algorithm, agent.config, observations[p], actions[p], agent.critic)
        if agent.sharing == "none":
            sets[("own", p)] = [p]
        elif agent.sharing == "group":
            sets.setdefault(("group", kind), []).append(p)
        else:
            sets.setdefault(("named", agent.sharing), []).append(p)
    for key, members in sets.items():
        first = members[0]
        for p in members[1:]:
            _check_alike(
                (agents[first], resolved[first], observations[first], actions[first]),
                (agents[p], resolved[p], observations[p], actions[p]),
                key[0],
            )
    return tuple(tuple(members) for members in sets.values())


def _check_alike(first: tuple, other: tuple, how: str) -> None:
    """Raise UsageError where two agents of a sharing set differ."""
    (name, a, observation, action), (other_name, b, other_observation, other_action) = first, other
    differences = [
        (what, left, right)
        for what, left, right in (
            ("learner", a.algorithm, b.algorithm),
            ("config", a.config, b.config),
            ("critic", a.critic, b.critic),
            ("observation space", observation[1:], other_observation[1:]),
            ("action space", action[1:], other_action[1:]),
        )
        if left != right
    ] + [
        (option, value, b.hparams._asdict().get(option))
        for option, value in a.hparams._asdict().items()
        if value != b.hparams._asdict().get(option)
    ]
    if differences:
        what, left, right = differences[0]
        raise UsageError(
            f"{name} and {other_name} share parameters (sharing = {how}) but differ in {what}: "
            f"{left} and {right}; make them equal, or put one in a sharing set of its own "
            f"(overrides: {{{other_name}: {{sharing: none}}}})"
        )


def _with_final_extras(env: Any, spec: TeamSpec) -> Any:
    """The environment with the global state of final states, where a critic bootstraps from it."""
    if spec.state is None:
        return env
    if isinstance(env, AutoReset):
        return dataclasses.replace(env, final_extras=("global_state",))
    key = jax.random.key(0)
    obs, state = jax.eval_shape(env.reset, key)
    action = {agent: spaces.shape_dtype(env.action_spaces[agent]) for agent in env.agents}
    timestep, _ = jax.eval_shape(env.step, key, state, action)
    if "global_state" not in (timestep.final_extras or {}):
        raise UsageError(
            "critic = 'state' bootstraps from the global state of an episode's end, and this "
            "environment's step gives no final_extras['global_state']; add it, or make the "
            "environment episodic and wrap it in marl.envs.AutoReset"
        )
    return env
