"""Whether what was asked for fits together: learners, critics, mixers and the environment."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from marl import critics, learning, sequential
from marl.agents.learner import Learner
from marl.binding import ReadyLearner
from marl.dispatch import TeamSpec, lift
from marl.envs import spaces
from marl.envs.errors import UsageError
from marl.envs.interface import AutoReset
from marl.rewards import RewardTeams, Terms
from marl.sharing import Resolved

ON_REPLAY = ("dqn", "sac", "td3", "ddpg")  # registered learners that learn from replay


def with_mixer(env: Any, spec: TeamSpec, resolved: Sequence[Resolved]) -> TeamSpec:
    """Raise UsageError where reward teams cannot be mixed; QMIX reads the global state if any."""
    built, teams = lift(spec).groups, spec.reward_teams
    valued = {p for group in built if learning.has_values(group) for p in group.positions}
    if all(len(members) == 1 for members in teams.members):
        raise UsageError(
            f"mixer = {spec.mixer!r} mixes the values of a reward team, and "
            + teams.why_alone([agent.name for agent in spec.agents], "mixer at 'none'")
        )
    for index, members in enumerate(teams.members):
        if len(members) > 1:
            _check_mixed_team(spec, index, members, resolved, valued)
    for members in spec.sharing_sets:
        owners = {i for p in members for i, team in enumerate(teams.members) if p in team}
        if len(owners) > 1 and members[0] in valued:
            raise UsageError(
                "agents that share parameters must be in one reward team under a mixer; "
                f"{', '.join(spec.agents[p].name for p in members)} are not"
            )
    state = critics.state_space(env) if spec.mixer == "qmix" else None
    return spec if state is None else dataclasses.replace(spec, state=spaces.signature(state))


_OF_A_MIXED_TEAM = (
    "gamma",
    "q_lambda",
    "tau",
    "target_update_interval",
    "reward_scale",
    *learning.CUT,
)


def _check_mixed_team(
    spec: TeamSpec,
    index: int,
    members: Sequence[int],
    resolved: Sequence[Resolved],
    valued: set[int],
) -> None:
    """Raise UsageError unless the members of a reward team can learn one value together."""
    name, names = spec.reward_teams.names[index], [spec.agents[p].name for p in members]
    cores = {p: _option(resolved[p], "core") or "none" for p in members}
    others = [spec.agents[p].name for p in members if p not in valued]
    if others:
        raise UsageError(
            f"mixer = {spec.mixer!r} needs learners of action values (dqn, pqn) for all of "
            f"reward team {name}; {', '.join(others)} have none"
        )
    if not spec.reward_teams.continues(index):
        raise UsageError("mixer needs death = 'continue' (or 'auto'): a team has one return")
    if len({resolved[p].algorithm for p in members}) > 1:
        raise UsageError(
            f"reward team {name} has learners of several kinds; under a mixer all of it must be "
            "dqn, which learns from replay, or pqn, which learns from rollouts"
        )
    if len({core == "none" for core in cores.values()}) > 1:
        raise UsageError(
            f"some of reward team {name} have memory ({_named(spec, cores)}), and a mixer learns "
            "from sequences of all members or from steps of all; give all of them a core, or none"
        )
    for option in _OF_A_MIXED_TEAM:
        if len({_option(resolved[p], option) for p in members}) > 1:
            raise UsageError(
                f"{option} differs among {', '.join(names)}, whose values are mixed to one; "
                "give the whole team one value"
            )


def _named(spec: TeamSpec, options: Mapping[int, Any]) -> str:
    """What agents have, by position, for people."""
    return ", ".join(f"{spec.agents[p].name}: {value}" for p, value in options.items())


def _option(agent: Resolved, name: str) -> Any:
    """An hparam or config field; None where the learner has none of that name."""
    if name == "reward_scale":
        return agent.reward_scale
    return getattr(agent.hparams, name, getattr(agent.config, name, None))


def without_replay(options: Mapping[str, Any], spec: TeamSpec) -> UsageError:
    """The error for sizes of a replay buffer in a team whose learners do not learn from one."""
    names = dict.fromkeys(_name(agent.algorithm) for agent in spec.agents)
    return UsageError(
        f"replay = {dict(options)} gives sizes of a replay buffer, and no learner of this team "
        f"({', '.join(names)}) learns from one; leave replay away, or use {', '.join(ON_REPLAY)}"
    )


def _name(algorithm: Any) -> str:
    return getattr(algorithm, "__name__", type(algorithm).__name__).rsplit(".", 1)[-1]


def check_learners(spec: TeamSpec, resolved: Sequence[Resolved]) -> None:
    """Raise UsageError where a learner wants what a team does not give, or lacks a critic."""
    for group in lift(spec).groups:
        agent = resolved[group.positions[0]]
        if isinstance(agent.algorithm, ReadyLearner):
            _check_ready(group.learner, agent.hparams)
        if group.learner.experience not in ("rollout", "replay"):
            raise UsageError(
                f"the learner of {spec.agents[group.positions[0]].name} wants experience = "
                f"{group.learner.experience!r}; teams give 'rollout' and 'replay'"
            )
        without = critics.kind(agent.algorithm) is None or (
            critics.kind(agent.algorithm) == "value"
            and group.learner.value is None
            and not group.held
        )
        if agent.critic != ("self",) and without:
            raise UsageError(
                f"learner {_name(agent.algorithm)!r} of "
                f"{spec.agents[group.positions[0]].name} has no critic, so critic = "
                f"{', '.join(agent.critic)} does not apply to it; leave critic at 'self', or use "
                "a learner with a critic, such as ppo or sac"
            )


def _check_ready(learner: Learner, hparams: Any) -> None:
    """Raise UsageError where a `Learner` given as such wants hparams, which nobody has."""
    try:
        jax.eval_shape(learner.init, jax.random.key(0), hparams)
    except AttributeError as error:
        raise UsageError(
            f"this Learner wants hparams ({error}) and was given as a Learner, which has none; "
            "give what makes it, a module or object with Config, Hparams and make"
        ) from error


def check_shared_networks(
    agents: Sequence[str],
    resolved: Sequence[Resolved],
    held: Sequence[Sequence[int]],
    scopes: Mapping[int, critics.Scope],
) -> None:
    """Raise UsageError where a critic in its actor's network would have to read something else."""
    from marl.agents import a2c, ppo  # haiku and distrax, which `import marl` leaves out

    apart = {position for members in held for position in members}
    for position, agent in enumerate(resolved):
        own = isinstance(agent.config, ppo.Config | a2c.Config) and agent.config.shared_network
        if own and position in apart:
            raise UsageError(
                f"sharing.critic = {agent.critic_sharing!r} shares the critic of "
                f"{agents[position]} apart from its actor, and with shared_network = True they "
                "are one network; leave sharing.critic away, or shared_network off"
            )
        if own and scopes[position] not in (("self",), (position,)):
            raise UsageError(
                f"critic = {', '.join(agent.critic)} of {agents[position]} is not what its actor "
                "reads, and with shared_network = True they are one network; "
                "leave critic at 'self', or shared_network off"
            )
        if own and agent.hparams.critic_learning_rate_scale != 1:
            raise UsageError(
                f"critic_learning_rate_scale = {agent.hparams.critic_learning_rate_scale} of "
                f"{agents[position]}: with shared_network = True its critic takes no steps of its "
                "own; leave critic_learning_rate_scale at 1, or shared_network off"
            )


def check_critic_sets(
    agents: Sequence[str],
    resolved: Sequence[Resolved],
    held: Sequence[Sequence[int]],
    scopes: Mapping[int, critics.Scope],
    observations: Sequence[Any],
) -> None:
    """Raise UsageError where agents share a critic apart from actors, and it could not be built.

    They have unequal observations and it reads their own, or it has memory.
    """
    for members in held:
        core = getattr(resolved[members[0]].config, "core", "none")
        if core != "none":
            raise UsageError(
                f"{', '.join(agents[p] for p in members)} share a critic apart from their actors, "
                f"and core = {core!r} gives it memory, which only critics of their own actors can "
                "have; let actors and critics be shared alike (sharing = 'group' or 'none'), or "
                "leave core at 'none'"
            )
        own = any("self" in scopes[p] for p in members)
        if own and len({observations[p] for p in members}) > 1:
            raise UsageError(
                f"{', '.join(agents[p] for p in members)} share a critic and have unequal "
                "observations: it can read one thing for all of them (critic = 'all', 'state', or "
                "a list of agents without 'self') if they are in one reward team with death = "
                "'auto' or 'continue'; else let agents of equal observations share one"
            )


def check_update_order(spec: TeamSpec) -> None:
    """Raise UsageError where nobody could learn in turn."""
    if spec.update_order != "sequential" or sequential.which(spec, lift(spec).groups):
        return
    does = "update_order = 'sequential' lets the agents of a reward team learn one after another"
    if all(len(members) == 1 for members in spec.reward_teams.members):
        names = [agent.name for agent in spec.agents]
        why = spec.reward_teams.why_alone(names, "update_order at 'simultaneous'")
        raise UsageError(f"{does}, and {why}")
    able = sequential.able(lift(spec).groups)
    for members in spec.reward_teams.members:
        turns = [p for own in able for p in own if p in members]
        if len(turns) > 1:  # of one actor, or they would learn in turn
            raise UsageError(
                f"{does}, and {', '.join(spec.agents[p].name for p in turns)} share one actor, "
                "which learns at once; give them actors of their own (sharing = 'none', or only "
                "sharing.actor = 'none'), or leave update_order at 'simultaneous'"
            )
    learners = {p: _name(agent.algorithm) for p, agent in enumerate(spec.agents)}
    raise UsageError(
        f"{does}, for learners that have policies and learn from rollouts, and no reward team has "
        f"two agents with such ({_named(spec, learners)}); give two of a team ppo or a2c, or leave "
        "update_order at 'simultaneous'"
    )


def check_terms(
    env: Any, terms: Terms, teams: RewardTeams, resolved: Sequence[Resolved], shaped: Any
) -> None:
    """Raise UsageError where rewards cannot be shaped or normalised."""
    if terms.shaped:
        _check_shaped_reward(env, shaped)
    if not terms.normalised:
        return
    by_team = [
        {_option(resolved[p], "gamma") for p in members} - {None} for members in teams.members
    ]
    if not any(by_team):
        raise UsageError(
            "normalize_rewards divides by the deviation of discounted returns, and no learner of "
            "this team has a gamma; leave it away"
        )
    for name, gammas in zip(teams.names, by_team, strict=True):
        if len(gammas) > 1:
            raise UsageError(
                f"normalize_rewards needs one gamma in reward team {name}, whose members have "
                f"{', '.join(f'{gamma:g}' for gamma in sorted(gammas))}; give them one, or leave "
                "normalize_rewards away"
            )


def _check_shaped_reward(env: Any, options: Any) -> None:
    """Raise UsageError where the environment gives no shaped rewards."""
    key = jax.random.key(0)
    _, state = jax.eval_shape(env.reset, key)
    action = {agent: spaces.shape_dtype(env.action_spaces[agent]) for agent in env.agents}
    info = jax.eval_shape(env.step, key, state, action)[0].info
    found = info.get("shaped_reward") if isinstance(info, Mapping) else None
    given = found if isinstance(found, Mapping) else {}
    shapes = {agent: getattr(x, "shape", None) for agent, x in given.items()}
    if shapes != dict.fromkeys(env.agents, ()):
        problem = f"has it as {_shapes(found)}" if found is not None else "has none"
        raise UsageError(
            f"shaped_reward = {dict(options)} adds info['shaped_reward'] of the environment, a "
            f"number per agent, to its rewards, and this environment {problem}; "
            "jaxmarl/overcooked and jaxmarl/overcooked_v2 have it. Leave shaped_reward away "
            "(shaped_reward.steps = 0), or let the environment give it"
        )


def _shapes(tree: Any) -> str:
    """Names and shapes of arrays, as in `ann: float32[2], bob: None`."""
    if isinstance(tree, Mapping):
        return ", ".join(f"{name}: {_shapes(x)}" for name, x in tree.items()) or "{}"
    if isinstance(tree, list | tuple):
        return f"[{', '.join(map(_shapes, tree))}]"
    if hasattr(tree, "dtype") and hasattr(tree, "shape"):
        return f"{tree.dtype}[{', '.join(map(str, tree.shape))}]"
    return repr(tree)


def with_final_extras(env: Any, spec: TeamSpec) -> Any:
    """The environment with what learners bootstrap from in final states."""
    key = jax.random.key(0)
    obs, state = jax.eval_shape(env.reset, key)
    wanted = {
        "global_state": spec.state is not None,
        "action_mask": spec.final_masks
        and bool(jax.tree.leaves(jax.eval_shape(env.action_mask, state))),
    }
    names = [name for name, asked in wanted.items() if asked]
    if not names:
        return env
    if isinstance(env, AutoReset):
        extras = dict.fromkeys((*env.final_extras, *names))
        return dataclasses.replace(env, final_extras=tuple(extras))
    action = {agent: spaces.shape_dtype(env.action_spaces[agent]) for agent in env.agents}
    timestep, _ = jax.eval_shape(env.step, key, state, action)
    for name in names:
        if name not in (timestep.final_extras or {}):
            raise UsageError(
                f"a learner bootstraps from the {name.replace('_', ' ')} of an episode's end, and "
                f"this environment's step gives no final_extras[{name!r}]; add it, or make the "
                "environment episodic and wrap it in marl.envs.AutoReset"
            )
    return env
