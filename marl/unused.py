"""Options that would do nothing: refused where a new team is made, so that nobody counts on them.

The team's options and each override are looked at apart. Refused is what does nothing for any of
the agents whose options come from there, and only where it does not come with what would switch it
on: a file may give a memory's size, and a line after it `core=none`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from marl import fitting
from marl.binding import ALGORITHMS
from marl.envs.errors import UsageError
from marl.sharing import Resolved

if TYPE_CHECKING:
    from marl.specs import Team

# option -> the option that switches it on, off by default in all learners of this library, and how
NEEDED = {
    "core_size": ("core", "core = 'gru' or 'lstm'"),
    "sequence_length": ("core", "core = 'gru' or 'lstm'"),
    "burn_in": ("core", "core = 'gru' or 'lstm'"),
    "huber_delta": ("value_loss", "value_loss = 'huber'"),
    "value_clip_epsilon": ("clip_values", "clip_values = True"),
    "learning_rate_end": ("learning_rate_schedule", "learning_rate_schedule = 'linear'"),
    "entropy_coef_end": ("entropy_schedule", "entropy_schedule = 'linear'"),
    "exploration_noise_end": ("exploration_schedule", "exploration_schedule = 'linear'"),
}


def check(team: "Team", resolved: Sequence[Resolved]) -> None:
    """Raise UsageError where an option that was given does nothing for anybody."""
    spec, request = team.spec, team.request
    if request["replay"] and spec.replay is None:
        raise fitting.without_replay(request["replay"], spec)
    _check_options(resolved)
    _check_reward_scale(team.agents, resolved)
    alone = all(len(members) == 1 for members in spec.reward_teams.members)
    if spec.reward_teams.pooling != "mean" and alone and request["reward_teams"] != "all":
        raise UsageError(
            f"reward_pooling = {spec.reward_teams.pooling!r} pools the rewards of a reward team, "
            "and " + spec.reward_teams.why_alone(team.agents, "reward_pooling at 'mean'")
        )
    shared = any(len(members) > 1 for members in (*spec.sharing_sets, *spec.critic_sets))
    # whom words and patterns find is up to the environment
    asked = any({r.sharing, r.critic_sharing} - {"none", None} for r in resolved)
    if not spec.agent_ids and not shared and not asked:
        raise UsageError(
            "agent_ids = False leaves out the one-hot of agents that share parameters, and no "
            "agents share any; give sharing, as in sharing = 'group', or leave agent_ids at True"
        )


def _origins(resolved: Sequence[Resolved], option: str) -> dict[str | None, list[int]]:
    """Where `option` was given (None: in the team's options), with positions of those it is of."""
    found: dict[str | None, list[int]] = {}
    for position, agent in enumerate(resolved):
        if option in agent.given:
            found.setdefault(agent.given[option], []).append(position)
    return found


def _named(option: str, pattern: str | None) -> str:
    return option if pattern is None else f"overrides.{pattern}: {option}"


def _check_options(resolved: Sequence[Resolved]) -> None:
    ours = [r for r in resolved if getattr(r.algorithm, "__name__", "").startswith("marl.agents.")]
    for option, (needed, how) in NEEDED.items():
        for pattern, positions in _origins(ours, option).items():
            agents = [ours[p] for p in positions]
            if any(needed in agent.given for agent in agents):
                continue
            value = getattr(agents[0].hparams, option, getattr(agents[0].config, option, None))
            raise UsageError(
                f"{_named(option, pattern)} = {value} does nothing without {needed}; "
                f"give {how} too, or leave {option} away"
            )


def _check_reward_scale(names: Sequence[str], resolved: Sequence[Resolved]) -> None:
    for pattern, positions in _origins(resolved, "reward_scale").items():
        scale = resolved[positions[0]].reward_scale
        if scale == 1 or any(_learns(resolved[p].algorithm) for p in positions):
            continue
        raise UsageError(
            f"{_named('reward_scale', pattern)} = {scale:g} is of what an agent learns from, "
            f"and {', '.join(names[p] for p in positions)} do not learn; "
            "leave reward_scale at 1"
        )


def _learns(algorithm: Any) -> bool:
    from marl.agents.fixed import Fixed  # which takes its time to import

    return not (
        isinstance(algorithm, Fixed) or getattr(algorithm, "__name__", None) == ALGORITHMS["frozen"]
    )
