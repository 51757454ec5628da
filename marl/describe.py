"""What a team is made of, in words, before anything compiles."""

import re
from typing import Any

import jax
import numpy as np

from marl import critics, sequential
from marl.agents.learner import Given
from marl.binding import REPLAY_OPTIONS
from marl.envs import spaces
from marl.groups import Group


def describe(team: Any) -> str:
    """Groups with agents, learner, parameters and critic input, and the hparams that differ."""
    lifted = team.lifted
    count = f"{len(team.agents)} agent{'s' * (len(team.agents) != 1)}"
    lines = [f"{count} in {len(lifted.groups)} group{'s' * (len(lifted.groups) != 1)}"]
    shapes = jax.eval_shape(team.learner.init, jax.random.key(0), team.group_hparams())
    for index, group in enumerate(lifted.groups):
        lines += ["", *_describe_group(team, index, group, shapes[index])]
    for group, state in zip(lifted.critics, shapes[len(lifted.groups) :], strict=True):
        lines += ["", *_describe_critics(team, group, state)]
    lines += ["", *_describe_rewards(team), *_describe_learning(team), *_describe_hparams(team)]
    return "\n".join(lines)


def _describe_critics(team: Any, group: Group, state: Any) -> list[str]:
    """Critics that the team holds apart from actors."""
    sets = [", ".join(team.agents[p] for p in members) for members in group.sets]
    return [
        f"critics of the team: {'; '.join(sets)}",
        f"  stacked       {_stacked(group, vmapped=len(sets) > 1)}",
        f"  reads         {_describe_observations(team, group)}",
        f"  parameters    {_count(state) // len(group.sets):,} per critic",
    ]


def _stacked(group: Group, vmapped: bool) -> str:
    num_sets, num_members = group.shape
    how = f"{num_sets} parameter sets" if num_sets > 1 else "one parameter set"
    if num_members > 1:
        how += f"{', each' * (num_sets > 1)} shared by {num_members} agents"
    return how + (", vmapped" if group.vectorise and vmapped else ", not vmapped")


def _describe_group(team: Any, index: int, group: Group, state: Any) -> list[str]:
    names = team.agents
    first = team.spec.agents[group.positions[0]]
    num_sets, num_members = group.shape
    reason = team.lifted.reasons[index]
    per = "set" if num_members > 1 else "agent"
    lines = [
        f"group {index}: {', '.join(names[p] for p in group.positions)}",
        f"  stacked       {_stacked(group, vmapped=max(group.shape) > 1)}",
        f"  learner       {_learner_name(first.algorithm)}",
        f"  observation   {spaces.describe(spaces.from_signature(first.observation))}"
        + (" + agent id" if group.identified else ""),
        f"  action        {spaces.describe(spaces.from_signature(first.action))}",
        f"  critic reads  {_describe_scope(team, group)}",
        f"  parameters    {_count(state) // num_sets:,} per {per}",
    ]
    if reason:
        lines.insert(1, f"  apart         differs in {reason}")
    return lines + [
        f"  {name:13} {names[p]}: {value.origin}"
        for p in group.positions
        for name, value in team.hparams[p]._asdict().items()
        if isinstance(value, Given)
    ]


def _learner_name(algorithm: Any) -> str:
    return getattr(algorithm, "__name__", type(algorithm).__name__).rsplit(".", 1)[-1]


def _describe_scope(team: Any, group: Group) -> str:
    kind = critics.kind(team.spec.agents[group.positions[0]].algorithm)
    if kind is None:
        return "nothing: this learner has no critic"
    if group.held:
        return "see the critics of the team below"
    others = " and the others' actions" if group.contexts[0] else ""
    return _describe_observations(team, group) + others


def _describe_observations(team: Any, group: Group) -> str:
    def name(source: Any) -> str:
        if source == "self":
            return "own observation" + (" and id" if group.identified else "")
        return "global state" if source == "state" else team.agents[source]

    texts = {", ".join(name(source) for source in scope): None for scope in group.scopes}
    if len(texts) == 1:
        return next(iter(texts)) + (" (one input for all)" if group.joint else "")
    return f"{next(iter(texts))} (and alike for the others)"


def _count(state: Any) -> int:
    """Elements of the networks' parameters in a learner's state."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return sum(
        int(np.prod(leaf.shape))
        for path, leaf in leaves
        if re.search(r"\.params\b", jax.tree_util.keystr(path))
    )


def _describe_rewards(team: Any) -> list[str]:
    teams = team.spec.reward_teams
    pooled = [i for i, members in enumerate(teams.members) if len(members) > 1]
    others = _describe_terms(team)
    if not pooled:
        return ["rewards: each agent its own", *others]
    return others + [
        f"rewards: {teams.names[i]} pools ({teams.pooling}) "
        f"{', '.join(team.agents[p] for p in teams.members[i])}"
        for i in pooled
    ]


def _describe_terms(team: Any) -> list[str]:
    """What is learned from beside the rewards as they are."""
    lines = []
    if team.spec.terms.shaped:
        own = team.reward_hparams
        stays = own.shaped_steps == float("inf")
        how = "stays" if stays else f"falls to 0 in {own.shaped_steps:,.0f} steps"
        lines.append(
            f"rewards: plus {own.shaped_weight:g} * the environment's shaped rewards, a weight "
            f"that {how}"
        )
    if team.spec.terms.normalised:
        lines.append("rewards: divided by the running standard deviation of discounted returns")
    if team.spec.terms.scaled:
        scales = zip(team.agents, team.reward_hparams.scale, strict=True)
        lines.append(f"rewards: times {', '.join(f'{x:g} ({agent})' for agent, x in scales)}")
    return lines


def _describe_learning(team: Any) -> list[str]:
    spec, lifted = team.spec, team.lifted
    lines = []
    if spec.update_order == "sequential":
        turns = [lifted.groups[i] for i in sequential.which(spec, lifted.groups)]
        sets = sorted(members for group in turns for members in group.sets)
        agents = [" with ".join(team.agents[p] for p in members) for members in sets]
        lines.append(f"updates: {', '.join(agents)} one after another, in random order")
    if spec.mixer != "none":
        reads = "the global state" if spec.state is not None else "the members' observations"
        how = {"vdn": "summed (vdn)", "qmix": f"mixed by a network that reads {reads} (qmix)"}
        lines.append(f"values of a reward team: {how[spec.mixer]}")
    if spec.replay is not None:
        sizes = [f"{name} {getattr(spec.replay, name):,}" for name in REPLAY_OPTIONS]
        if spec.replay.sequence > 1:
            sizes.append(f"windows of {spec.replay.window} steps")
        lines.append(f"replay: {', '.join(sizes)}")
    return lines


def _describe_hparams(team: Any) -> list[str]:
    """Hparams with more than one value among the agents that have them."""
    values: dict[str, dict[str, float]] = {}
    for agent, hparams in zip(team.agents, team.hparams, strict=True):
        for name, value in hparams._asdict().items():
            if isinstance(value, Given):
                continue
            values.setdefault(name, {})[agent] = value
    differing = {
        name: by_agent for name, by_agent in values.items() if len(set(by_agent.values())) > 1
    }
    if not differing:
        return ["hparams: equal for all agents"]
    return ["hparams that differ:"] + [
        f"  {name}: " + ", ".join(f"{agent} {value:g}" for agent, value in by_agent.items())
        for name, by_agent in differing.items()
    ]
