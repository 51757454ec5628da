"""`marl.team`: what the user asks for, resolved into a team.

Options are resolved agent by agent: the team's, then every matching override in order; the later
match wins. Floats become hparams, everything else config.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from marl import critics, fitting, groups, learning, unused
from marl import sharing as sharing_of
from marl.agents.learner import Given, Learner
from marl.agents.validation import one_of
from marl.binding import bind_replay
from marl.dispatch import AgentSpec, Lifted, TeamSpec, lift
from marl.envs import registry as environments
from marl.envs import spaces
from marl.envs.errors import UsageError, nearest
from marl.envs.interface import AutoReset
from marl.resolve import TEAM_OPTIONS, resolve_agent
from marl.rewards import (
    DEATHS,
    POOLINGS,
    RewardHparams,
    RewardTeams,
    Terms,
    bind_shaped,
    parse_teams,
)
from marl.sharing import Resolved, critic_sets, sharing_sets


@dataclass(frozen=True)
class Team:
    """All agents of one environment together. Made by `marl.team`; a value, without parameters."""

    env: Any
    spec: TeamSpec
    hparams: tuple[Any, ...]  # per agent in declared order, NamedTuples of floats (or `Given`)
    source: Any = None  # the environment as it was given
    request: Any = field(default=None, compare=False)  # the arguments of `team`, for the record
    reward_hparams: RewardHparams = RewardHparams()  # floats of the terms in `spec.terms`

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
        """Per group, a NamedTuple of float32 arrays [S]: one value per sharing set.

        Where arrays are given instead of a float, these stand in its place, [S, ...]. A team that
        learns from more than rewards as they are has its `RewardHparams` after the groups.
        """

        def stacked(*values: Any) -> Any:
            if isinstance(values[0], Given):
                return jax.tree.map(lambda *xs: jnp.stack(xs), *(x.arrays for x in values))
            return jnp.asarray(values, jnp.float32)

        found = tuple(
            jax.tree.map(stacked, *(self.hparams[members[0]] for members in group.sets))
            for group in self.lifted.groups
        )
        if not any(self.spec.terms):
            return found
        floats = (jnp.asarray(x, jnp.float32) for x in self.reward_hparams)
        return (*found, RewardHparams(*floats))

    def agent_state(self, state: tuple[Any, ...], agent: str) -> Any:
        """One agent's learner state out of the team's."""
        if agent not in self.agents:
            raise KeyError(f"no agent {agent!r}: {nearest(agent, self.agents)}")
        built = self.lifted.groups
        return groups.of_position(built, state[: len(built)], self.agents.index(agent))

    def check(self, batch_shape: tuple[int, int]) -> None:
        """Raise UsageError where a learner cannot learn from (T, number of environments)."""
        if self.spec.replay is not None:
            self.spec.replay.check(batch_shape[1], batch_shape[0])
        for group in self.lifted.groups:
            if group.learner.check is not None:
                group.learner.check(batch_shape)

    def describe(self) -> str:
        """The text that `marl describe` prints; compiles nothing."""
        from marl.describe import describe

        return describe(self)


def team(
    env: Any,
    learner: Any = "ppo",
    *,
    critic: Any = "self",
    sharing: Any = "none",
    reward_teams: Any = "none",
    reward_pooling: str = "mean",
    death: str = "auto",
    shaped_reward: Mapping[str, float] | None = None,
    reward_scale: float = 1.0,
    normalize_rewards: bool = False,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    agent_ids: bool = True,
    mixer: str = "none",
    replay: Mapping[str, float] | None = None,
    update_order: str = "simultaneous",
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
        `{set_name: [patterns]}`; `{"actor": ..., "critic": ...}` says it apart for state-value
        critics, which may also be one per "reward_team".
      reward_teams: whose rewards are pooled: "none", "all", or `{team_name: [patterns]}`.
      reward_pooling: "mean" or "sum" over a reward team.
      death: whether the return of an agent that is out runs on with its reward team's ("continue")
        or ends ("terminal"); "auto" continues inside a reward team.
      shaped_reward: learn from the environment's shaped rewards too, with a weight that falls
        linearly from `weight` (1 by default) to 0 over `steps` environment steps, as in
        `{"steps": 1e6}`. Returns that are reported stay those of the rewards themselves.
      reward_scale: what an agent learns from is its pooled reward times this.
      normalize_rewards: divide pooled rewards by the running standard deviation of their discounted
        return, too, and cut them at 10 of it.
      overrides: `{pattern: {option: value}}`, where an option is any of the learner's, or
        `learner`, `critic`, `sharing` or `reward_scale`. Patterns know `*` and `?`; the later match
        wins.
      agent_ids: add a one-hot of the agent to observations where parameters are shared.
      mixer: value decomposition over reward teams, for learners of action values: "none", "vdn" or
        "qmix".
      replay: sizes of the team's replay buffer, only where a learner wants samples of it: any of
        `capacity`, `batch_size`, `updates_per_rollout`, `learning_starts`, `n_step` (see
        `marl.replay.Replay`).
      update_order: "simultaneous", or "sequential": the agents of a reward team learn one after
        another, in random order, each knowing what those before it changed (HAPPO).
      vectorise: False builds the same team as a Python loop, for tests and debugging.
      **learner_options: any field of the learner's Config or Hparams.

    Raises:
      UsageError: with what was given, what was expected and what to do.
    """
    request = {
        "learner": learner,
        "learner_options": learner_options,
        "critic": critic,
        "sharing": sharing,
        "reward_teams": reward_teams,
        "reward_pooling": reward_pooling,
        "death": death,
        "shaped_reward": shaped_reward or {},
        "reward_scale": reward_scale,
        "normalize_rewards": normalize_rewards,
        "overrides": {} if overrides is None else overrides,
        "agent_ids": agent_ids,
        "mixer": mixer,
        "replay": replay or {},
        "update_order": update_order,
        "vectorise": vectorise,
    }
    made, resolved = _make(env, request)
    unused.check(made, resolved)
    return made


def rebuild(env: Any, request: Mapping[str, Any]) -> Team:
    """The team that `request` (`Team.request`) once made, also where a new one would be refused.

    Raises:
      UsageError: it does not fit together.
    """
    return _make(env, request)[0]


def _make(env: Any, request: Mapping[str, Any]) -> tuple[Team, list[Resolved]]:
    """The team, and what its agents were resolved to."""
    ask = SimpleNamespace(**request)
    if not isinstance(ask.overrides, Mapping):
        raise UsageError(
            f"overrides = {ask.overrides!r} is a {type(ask.overrides).__name__}; write "
            "{pattern: {option: value}}"
        )
    reward_hparams = bind_shaped(ask.shaped_reward)
    inner = env.env if isinstance(env, AutoReset) else env
    if missing := environments.missing_members(inner):
        raise UsageError(f"the environment {type(inner).__name__} lacks {', '.join(missing)}")
    source, env = env, environments.by_name(env)
    environments.check_hash(env)
    environments.validate(env)
    agents = tuple(env.agents)
    one_of("reward_pooling", ask.reward_pooling, POOLINGS)
    one_of("death", ask.death, DEATHS)
    one_of("mixer", ask.mixer, learning.MIXERS)
    one_of("update_order", ask.update_order, learning.UPDATE_ORDERS)
    named = sharing_of.named_sets(ask.sharing, agents)
    for name in ("normalize_rewards", "agent_ids", "vectorise"):
        if not isinstance(getattr(ask, name), bool):
            raise UsageError(f"{name} = {getattr(ask, name)!r}; give True or False")
    base = {name: request[name] for name in TEAM_OPTIONS if name != "sharing"}
    base |= ask.learner_options
    resolved = [resolve_agent(env, agent, base, named, ask.overrides) for agent in agents]
    teams = RewardTeams(*parse_teams(ask.reward_teams, agents), ask.reward_pooling, ask.death)
    spec = _spec(env, agents, resolved, teams, ask.agent_ids, ask.vectorise)
    spec = dataclasses.replace(spec, mixer=ask.mixer, update_order=ask.update_order)
    if any(learning.on_replay(group) for group in lift(spec).groups):
        windows = [group.learner.window for group in lift(spec).groups if learning.on_replay(group)]
        sizes = bind_replay(ask.replay)._replace(sequence=max(windows))
        spec = dataclasses.replace(spec, replay=sizes)
    if ask.mixer != "none":
        spec = fitting.with_mixer(env, spec, resolved)
    fitting.check_learners(spec, resolved)
    fitting.check_update_order(spec)
    scale = tuple(float(agent.reward_scale) for agent in resolved)
    reward_hparams = reward_hparams._replace(scale=scale)
    terms = Terms(reward_hparams.shaped_steps > 0, set(scale) != {1.0}, ask.normalize_rewards)
    fitting.check_terms(env, terms, teams, resolved, ask.shaped_reward)
    spec = dataclasses.replace(spec, terms=terms)
    hparams = tuple(agent.hparams for agent in resolved)
    env = fitting.with_final_extras(env, spec)
    kept = {name: dict(x) if isinstance(x, Mapping) else x for name, x in request.items()}
    return Team(env, spec, hparams, source, kept, reward_hparams), resolved


def same_environment(env: Any, team: Team) -> bool:
    """Whether `team` was made for `env`."""
    return env == team.source or environments.by_name(env) == environments.by_name(team.source)


def _spec(
    env: Any,
    agents: tuple[str, ...],
    resolved: Sequence[Resolved],
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
    sets = sharing_sets(agents, resolved, observations, actions)
    team_of = {p: index for index, members in enumerate(teams.members) for p in members}
    scopes: dict[int, critics.Scope] = {}
    one_critic = critic_sets(agents, resolved, observations, sets, team_of)
    for members in one_critic:
        pooled = {team_of[p] for p in members}
        apart = len(pooled) > 1 or not all(teams.continues(team) for team in pooled)
        reads_actions = critics.kind(resolved[members[0]].algorithm) == "q"
        own_first = len(members) > 1 and (apart or reads_actions)
        for p in members:
            scopes[p] = critics.resolve(
                resolved[p].critic, p, own_first, agents, observations, members
            )
    held = tuple(members for members in one_critic if members not in sets)
    fitting.check_critic_sets(agents, resolved, held, scopes, observations)
    fitting.check_shared_networks(agents, resolved, held, scopes)
    return TeamSpec(
        agents=tuple(
            AgentSpec(agent, r.algorithm, r.config, scopes[p], observations[p], actions[p])
            for p, (agent, r) in enumerate(zip(agents, resolved, strict=True))
        ),
        sharing_sets=sets,
        reward_teams=teams,
        state=None if state is None else spaces.signature(state),
        agent_ids=agent_ids,
        vectorise=vectorise,
        critic_sets=held,
    )
