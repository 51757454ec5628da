"""Options that would do nothing: refused where a team is made, so that nobody counts on them.

Only what nobody in the team uses is refused, and only where it does not come with what would switch
it on: a file may give a memory's size, and a line after it `core=none`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from marl.binding import ALGORITHMS
from marl.envs.errors import UsageError
from marl.sharing import Resolved

if TYPE_CHECKING:
    from marl.dispatch import TeamSpec

# option -> the option that switches it on, off by default in all learners of this library, and how
NEEDED = {
    "core_size": ("core", "core = 'gru' or 'lstm'"),
    "huber_delta": ("value_loss", "value_loss = 'huber'"),
    "value_clip_epsilon": ("clip_values", "clip_values = True"),
    "learning_rate_end": ("learning_rate_schedule", "learning_rate_schedule = 'linear'"),
    "entropy_coef_end": ("entropy_schedule", "entropy_schedule = 'linear'"),
}


def check(spec: "TeamSpec", resolved: Sequence[Resolved], reward_teams: Any) -> None:
    """Raise UsageError where an option that was given does nothing for anybody."""
    _check_options(resolved)
    _check_reward_scale(spec, resolved)
    alone = all(len(members) == 1 for members in spec.reward_teams.members)
    if spec.reward_teams.pooling != "mean" and alone and reward_teams != "all":
        names = [agent.name for agent in spec.agents]
        raise UsageError(
            f"reward_pooling = {spec.reward_teams.pooling!r} pools the rewards of a reward team, "
            "and " + spec.reward_teams.why_alone(names, "reward_pooling at 'mean'")
        )
    shared = any(len(members) > 1 for members in (*spec.sharing_sets, *spec.critic_sets))
    words = {"group", "reward_team"}  # whom they find is up to the environment
    asked = any(words & {r.sharing, r.critic_sharing} for r in resolved)
    if not spec.agent_ids and not shared and not asked:
        raise UsageError(
            "agent_ids = False leaves out the one-hot of agents that share parameters, and no "
            "agents share any; give sharing, as in sharing = 'group', or leave agent_ids at True"
        )


def _origins(resolved: Sequence[Resolved], option: str) -> dict[str, list[Resolved]]:
    """Where `option` was given: the team's options, or an override, with the agents it is of."""
    found: dict[str, list[Resolved]] = {}
    for agent in resolved:
        if option in agent.given:
            found.setdefault(agent.given[option], []).append(agent)
    return found


def _check_options(resolved: Sequence[Resolved]) -> None:
    ours = [r for r in resolved if getattr(r.algorithm, "__name__", "").startswith("marl.agents.")]
    for option, (needed, how) in NEEDED.items():
        for origin, agents in _origins(ours, option).items():
            if any(needed in agent.given for agent in agents):
                continue
            value = getattr(agents[0].hparams, option, getattr(agents[0].config, option, None))
            raise UsageError(
                f"{origin}{option} = {value} does nothing without {needed}; "
                f"give {how} too, or leave {option} away"
            )


def _check_reward_scale(spec: "TeamSpec", resolved: Sequence[Resolved]) -> None:
    names = {id(agent): of.name for agent, of in zip(resolved, spec.agents, strict=True)}
    for origin, agents in _origins(resolved, "reward_scale").items():
        if agents[0].reward_scale == 1 or any(_learns(agent.algorithm) for agent in agents):
            continue
        raise UsageError(
            f"{origin}reward_scale = {agents[0].reward_scale:g} is of what an agent learns from, "
            f"and {', '.join(names[id(agent)] for agent in agents)} do not learn; "
            "leave reward_scale at 1"
        )


def _learns(algorithm: Any) -> bool:
    from marl.agents.fixed import Fixed  # which takes its time to import

    return not (
        isinstance(algorithm, Fixed) or getattr(algorithm, "__name__", None) == ALGORITHMS["frozen"]
    )
