"""What has to be known about each JaxMARL environment; nothing here imports jaxmarl.

A `Family` collects the answers that JaxMARL gives in a different way from one environment to the
next. In its functions `env` is JaxMARL's object, `before` and `after` its states around a step,
`action` the dict it was given, `info` what it returned, and `index` a position in `env.agents`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Family(NamedTuple):
    """Environments that behave alike."""

    # [N] or [] bool: whom the time limit cuts off, given that the episode ends with this step
    cut: Callable[[Any, Any, Any, Any, Any], Any]
    observe: Callable[[Any, Any, int], Any]  # (observations, JaxMARL's agent id, index) -> its own
    mask: Callable[[Any, Any], Any] | None = None  # (env, state) -> masks by JaxMARL's agent id
    global_state: Callable[[Any, Any], Any] | None = None  # (env, state) -> array
    success: Callable[[Any, Any], Any] | None = None  # (env, state) -> [] bool: the team has won
    parameters: tuple[str, ...] = ()  # constructor parameters that its signature does not show
    inherits: str = ""  # a class that gets the constructor's further arguments
    is_brax: bool = False  # needs brax, whose own constructors refuse unknown arguments
    arrays: tuple[str, ...] = ()  # parameters that have to be arrays where a user gives a list
    fixed: tuple[tuple[str, Any], ...] = ()  # arguments that users do not choose


class Row(NamedTuple):
    """One id: its class in jaxmarl, its family, and what `listing` says about it."""

    constructor: str
    family: str
    agents: str
    note: str = ""


def by_agent(obs: Any, agent: Any, index: int) -> Any:
    return obs[agent]


def by_index(obs: Any, agent: Any, index: int) -> Any:
    return obs[index]


def _storm_observation(obs: Any, agent: Any, index: int) -> Any:
    """`observations` [N, 5, 5, C] has the agents first; `inventory` [5, N] has them last."""
    return {"observations": obs["observations"][index], "inventory": obs["inventory"][:, index]}


def _always(env: Any, before: Any, action: Any, after: Any, info: Any) -> bool:
    return True


def _never(env: Any, before: Any, action: Any, after: Any, info: Any) -> bool:
    return False


def _riddle_cut(env: Any, before: Any, action: Any, after: Any, info: Any) -> jax.Array:
    """The episode ends when the agent in the room tells, else after its limit."""
    actions = jnp.stack([jnp.asarray(action[agent]) for agent in env.agents])
    return actions[before.agent_in_room] != env.game_actions["TELL"]


def _battle(state: Any) -> Any:
    """SMAX's own state, which the variants with built-in enemies keep inside theirs."""
    return getattr(state, "state", state)


def _decided(env: Any, state: Any) -> tuple[jax.Array, jax.Array]:
    """Whether all allies, and whether all enemies, are dead."""
    alive = _battle(state).unit_alive
    return ~jnp.any(alive[: env.num_allies]), ~jnp.any(alive[env.num_allies :])


def _smax_cut(env: Any, before: Any, action: Any, after: Any, info: Any) -> jax.Array:
    """Survivors of an undecided battle; who died in the last step is terminated."""
    allies_dead, enemies_dead = _decided(env, after)
    return _battle(after).unit_alive[: len(env.agents)] & ~(allies_dead | enemies_dead)


def _smax_success(env: Any, state: Any) -> jax.Array:
    allies_dead, enemies_dead = _decided(env, state)
    return enemies_dead & ~allies_dead


def _smax_mask(env: Any, state: Any) -> Any:
    return env.get_avail_actions(state)


def _smax_global_state(env: Any, state: Any) -> jax.Array:
    return env.get_world_state(state)


def _jaxnav_cut(env: Any, before: Any, action: Any, after: Any, info: Any) -> jax.Array:
    """Agents that have neither crashed nor reached their goal."""
    return ~(after.move_term | after.goal_reached)


def _brax_cut(env: Any, before: Any, action: Any, after: Any, info: Any) -> jax.Array:
    return info["truncation"] > 0


def _hanabi_mask(env: Any, state: Any) -> Any:
    return env.get_legal_moves(state)


_MPE_ARRAYS = (
    *("rad", "moveable", "silent", "collide", "mass", "accel", "max_speed"),
    *("u_noise", "c_noise"),
)
_MPE_NUMBERS = ("max_steps", "dt", "damping", "contact_force", "contact_margin")
_SMAX_ARRAYS = (
    *("unit_type_velocities", "unit_type_attacks", "unit_type_attack_ranges"),
    *("unit_type_sight_ranges", "unit_type_radiuses", "unit_type_health"),
    "unit_type_weapon_cooldowns",
)
_MABRAX = (
    *("episode_length", "action_repeat", "homogenisation_method", "backend"),
    "those of the Brax environment",
)

_MPE = Family(
    cut=_always,
    observe=by_agent,
    parameters=(*_MPE_NUMBERS, *_MPE_ARRAYS),
    arrays=_MPE_ARRAYS,
)
_SMAX = Family(
    cut=_smax_cut,
    observe=by_agent,
    mask=_smax_mask,
    global_state=_smax_global_state,
    arrays=_SMAX_ARRAYS,
)
_STORM = Family(cut=_always, observe=_storm_observation, arrays=("payoff_matrix",))

FAMILIES = {
    "mpe": _MPE,
    "mpe_preset": Family(cut=_always, observe=by_agent),
    "riddle": Family(cut=_riddle_cut, observe=by_agent),
    "smax": _SMAX,
    "smax_enemy": _SMAX._replace(success=_smax_success, inherits="SMAX"),
    "mabrax": Family(
        cut=_brax_cut,
        observe=by_agent,
        parameters=_MABRAX,
        is_brax=True,
        fixed=(("auto_reset", False),),
    ),
    "storm": _STORM,
    "storm_listed": _STORM._replace(observe=by_index),
    "hanabi": Family(cut=_never, observe=by_agent, mask=_hanabi_mask),
    "fixed_length": Family(cut=_always, observe=by_agent),
    "jaxnav": Family(cut=_jaxnav_cut, observe=by_agent),
}

TABLE = {
    "MPE_simple_v3": Row("SimpleMPE", "mpe", "1 agent"),
    "MPE_simple_spread_v3": Row(
        "SimpleSpreadMPE", "mpe", "3 agents", "cooperative; num_agents, num_landmarks"
    ),
    "MPE_simple_reference_v3": Row(
        "SimpleReferenceMPE", "mpe", "2 agents", "cooperative, communication"
    ),
    "MPE_simple_speaker_listener_v4": Row(
        "SimpleSpeakerListenerMPE", "mpe", "speaker, listener", "cooperative"
    ),
    "MPE_simple_tag_v3": Row("SimpleTagMPE", "mpe", "3 adversaries, 1 agent"),
    "MPE_simple_adversary_v3": Row("SimpleAdversaryMPE", "mpe", "1 adversary, 2 agents"),
    "MPE_simple_push_v3": Row("SimplePushMPE", "mpe", "1 adversary, 1 agent"),
    "MPE_simple_crypto_v3": Row("SimpleCryptoMPE", "mpe", "eve, alice, bob", "communication"),
    "MPE_simple_world_comm_v3": Row(
        "SimpleWorldCommMPE", "mpe", "1 leader, 3 adversaries, 2 agents", "continuous"
    ),
    "MPE_simple_facmac_v1": Row("SimpleFacmacMPE", "mpe", "3 adversaries, 1 agent", "continuous"),
    "MPE_simple_facmac_3a_v1": Row(
        "SimpleFacmacMPE3a", "mpe_preset", "3 adversaries, 1 agent", "continuous"
    ),
    "MPE_simple_facmac_6a_v1": Row(
        "SimpleFacmacMPE6a", "mpe_preset", "6 adversaries, 2 agents", "continuous"
    ),
    "MPE_simple_facmac_9a_v1": Row(
        "SimpleFacmacMPE9a", "mpe_preset", "9 adversaries, 3 agents", "continuous"
    ),
    "switch_riddle": Row("SwitchRiddle", "riddle", "3 agents", "cooperative; num_agents"),
    "SMAX": Row("SMAX", "smax", "5 allies, 5 enemies", "both teams; scenario=<name>"),
    "HeuristicEnemySMAX": Row(
        "HeuristicEnemySMAX", "smax_enemy", "5 allies", "cooperative; scenario=<name>"
    ),
    "ant_4x2": Row("Ant", "mabrax", "4 agents", "continuous"),
    "halfcheetah_6x1": Row("HalfCheetah", "mabrax", "6 agents", "continuous"),
    "hopper_3x1": Row("Hopper", "mabrax", "3 agents", "continuous"),
    "humanoid_9|8": Row("Humanoid", "mabrax", "2 agents", "continuous"),
    "walker2d_2x3": Row("Walker2d", "mabrax", "2 agents", "continuous"),
    "storm": Row("InTheGrid", "storm", "2 agents", "social dilemma; num_agents"),
    "storm_2p": Row("InTheGrid_2p", "storm_listed", "2 agents", "social dilemma"),
    "storm_np": Row("InTheMatrix", "storm_listed", "2 agents", "social dilemma; num_agents"),
    "hanabi": Row("Hanabi", "hanabi", "2 agents", "cooperative, turn-based; num_agents"),
    "overcooked": Row("Overcooked", "fixed_length", "2 agents", "cooperative; layout=<name>"),
    "overcooked_v2": Row("OvercookedV2", "fixed_length", "2 agents", "cooperative; layout=<name>"),
    "coin_game": Row("CoinGame", "fixed_length", "2 agents", "social dilemma"),
    "jaxnav": Row("JaxNav", "jaxnav", "2 agents", "continuous; num_agents"),
}

_ROBOTARIUM = "needs the package jaxrobotarium, which is not on PyPI"
UNAVAILABLE = {
    "LearnedPolicyEnemySMAX": (
        "needs a trained enemy policy and its parameters, which no argument on a command line can "
        "give; use HeuristicEnemySMAX, or SMAX with a frozen team"
    ),
    "JaxRobotarium_navigation": _ROBOTARIUM,
    "JaxRobotarium_discovery": _ROBOTARIUM,
    "JaxRobotarium_material_transport": _ROBOTARIUM,
    "JaxRobotarium_warehouse": _ROBOTARIUM,
    "JaxRobotarium_arctic_transport": _ROBOTARIUM,
    "JaxRobotarium_foraging": _ROBOTARIUM,
    "JaxRobotarium_rware": _ROBOTARIUM,
    "JaxRobotarium_predator_prey": _ROBOTARIUM,
}
