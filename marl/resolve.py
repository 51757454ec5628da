"""One agent's options: the team's, then every matching override in order; the later match wins."""

from collections.abc import Mapping
from typing import Any

from marl import critics, patterns
from marl import sharing as sharing_of
from marl.binding import bind_options, resolve_algorithm
from marl.envs.errors import UsageError
from marl.rewards import check_scale
from marl.sharing import Resolved

TEAM_OPTIONS = ("learner", "critic", "sharing", "reward_scale")  # beside the learner's


def resolve_agent(
    env: Any,
    agent: str,
    base: Mapping[str, Any],
    named: tuple[sharing_of.Named, sharing_of.Named],
    overrides: Mapping[str, Mapping[str, Any]],
) -> Resolved:
    """The options of `agent`.

    Args:
      env: the environment.
      agent: its id.
      base: the team's options, but for sharing.
      named: who shares actors, and who shares critics.
      overrides: options by pattern.
    """
    agents, options = tuple(env.agents), dict(base)
    given: dict[str, str | None] = dict.fromkeys(base)
    options["sharing"] = dict(zip(sharing_of.PARTS, (n.of(agent) for n in named), strict=True))
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
            options = {name: options[name] for name in TEAM_OPTIONS}
            given = {name: given[name] for name in TEAM_OPTIONS if name in given}
            changed = resolve_algorithm(changes["learner"])
            if critics.kind(changed) is None:
                options["critic"] = "self"  # the team's does not apply to it
            if not hasattr(changed, "make_critic"):
                actor, _ = sharing_of.by_part(options["sharing"], f"sharing of {agent}")
                options["sharing"] = {"actor": actor, "critic": None}
        if isinstance(changes.get("sharing"), Mapping):  # of actor and critic, what it names
            where = f"sharing of {agent}"
            before = dict(
                zip(sharing_of.PARTS, sharing_of.by_part(options["sharing"], where), strict=True)
            )
            changes = {**changes, "sharing": before | dict(changes["sharing"])}
        options |= changes
        given |= dict.fromkeys(changes, pattern)
    sharing = sharing_of.resolve(options["sharing"], agent, *named)
    algorithm = resolve_algorithm(options["learner"])
    config, hparams = bind_options(
        algorithm, options["learner"], {k: v for k, v in options.items() if k not in TEAM_OPTIONS}
    )
    if hasattr(algorithm, "bind"):
        if sharing[0] in named[0].set_of.values():
            raise UsageError(
                f"{agent} is in the sharing set {sharing[0]!r}, and learner {options['learner']!r} "
                f"shares nothing; take {agent} out of sharing.{sharing[0]}"
            )
        sharing = ("none", None)
        config, hparams = algorithm.bind(env, agent, config, hparams)
    critic = critics.parse(options["critic"], "critic", agents)
    check_scale(options["reward_scale"], agent)
    return Resolved(algorithm, config, hparams, critic, *sharing, options["reward_scale"], given)
