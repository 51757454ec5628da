"""Every broken promise of an environment is found before anything runs, and named."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from marl.envs.errors import UsageError
from marl.envs.features import Masked
from marl.envs.registry import validate
from marl.envs.spaces import Box, Discrete

MEMBERS = (
    *("agents", "observation_spaces", "action_spaces"),
    *("reset", "step", "action_mask", "global_state"),
)
BASE = Masked()


def variant(**changes):
    """`Masked` with other members; a change to None removes one."""
    members = {name: getattr(BASE, name) for name in MEMBERS} | changes
    return SimpleNamespace(**{k: v for k, v in members.items() if v is not None})


def with_step(change):
    """`Masked` whose time steps are changed."""

    def step(key, state, action):
        timestep, state = BASE.step(key, state, action)
        return change(timestep), state

    return variant(step=step)


def with_obs(change):
    def reset(key):
        obs, state = BASE.reset(key)
        return change(obs), state

    return variant(reset=reset)


SPACE, NOT_AGENTS = BASE.observation_spaces["agent_0"], BASE.observation_spaces | {"ghost": 0}

CASES = {
    "no step": (variant(step=None), "lacks step"),
    "no mask": (variant(action_mask=None), "lacks action_mask"),
    "no agents at all": (variant(agents=()), r"agents = \(\)"),
    "integer agents": (variant(agents=(0, 1)), r"agents = \(0, 1\)"),
    "agents twice": (variant(agents=("a", "a")), "distinct"),
    "spaces are a list": (variant(action_spaces=[Discrete(4)] * 2), "action_spaces is a list"),
    "a space of a ghost": (variant(observation_spaces=NOT_AGENTS), "ghost is not an agent"),
    "a missing space": (
        variant(action_spaces={"agent_0": Discrete(4)}),
        "action_spaces: nothing for agent agent_1",
    ),
    "not a space": (
        variant(action_spaces={"agent_0": Discrete(4), "agent_1": 4}),
        r"action_spaces\['agent_1'\]: expected a Box",
    ),
    "a ghost": (
        with_obs(lambda obs: obs | {"world_state": jnp.zeros(3)}),
        "world_state is not an agent",
    ),
    "no observation": (
        with_obs(lambda obs: {"agent_0": obs["agent_0"]}),
        "reset: nothing for agent agent_1",
    ),
    "a shape that is not the space's": (
        variant(observation_spaces={"agent_0": SPACE, "agent_1": Box((5,))}),
        r"float32\[4\] as the observation of agent_1, and its space is Box\(5\)",
    ),
    "a dtype that is not the space's": (
        variant(observation_spaces={"agent_0": SPACE, "agent_1": Box((4,), dtype="uint8")}),
        r"Box\(4\) uint8",
    ),
    "an untraceable reset": (
        with_obs(lambda obs: obs if float(obs["agent_0"][0]) else obs),
        "reset cannot be traced",
    ),
    "no time step": (with_step(tuple), r"step returned tuple; expected \(TimeStep, state\)"),
    "no reward": (
        with_step(lambda t: t._replace(reward={"agent_0": t.reward["agent_0"]})),
        "reward of step: nothing for agent agent_1",
    ),
    "a reward for nobody": (
        with_step(lambda t: t._replace(reward=t.reward | {"__all__": 0.0})),
        "__all__ is not an agent",
    ),
    "an integer reward": (
        with_step(lambda t: t._replace(reward=dict.fromkeys(t.reward, jnp.asarray(1)))),
        r"int32\[\] as reward of agent_0; expected a scalar float32",
    ),
    "a vector of rewards": (
        with_step(lambda t: t._replace(reward=dict.fromkeys(t.reward, jnp.zeros(1)))),
        r"float32\[1\] as reward",
    ),
    "one flag for all": (
        with_step(lambda t: t._replace(terminated=t.episode_over)),
        "terminated of step",
    ),
    "a flag that is no bool": (
        with_step(lambda t: t._replace(episode_over=jnp.zeros(()))),
        "episode_over; expected a scalar bool",
    ),
    "another final_obs": (
        with_step(lambda t: t._replace(final_obs=dict.fromkeys(t.obs, jnp.zeros(3)))),
        "final_obs",
    ),
    "a state that changes": (
        variant(step=lambda k, s, a: (BASE.step(k, s, a)[0], s._replace(step=1.5 * s.step))),
        r"step is int32\[\], then float32\[\]",
    ),
    "a mask of the wrong size": (
        variant(action_mask=lambda s: dict.fromkeys(BASE.agents, jnp.ones(3, bool))),
        r"bool\[3\] to agent_0.*expected bool\[4\]",
    ),
    "a mask that is no bool": (
        variant(action_mask=lambda s: dict.fromkeys(BASE.agents, jnp.ones(4))),
        r"expected bool\[4\]",
    ),
    "a mask for nobody": (
        variant(action_mask=lambda s: {"agent_0": jnp.ones(4, bool)}),
        "action_mask: nothing for agent agent_1",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_broken_promises_are_named(case):
    env, message = CASES[case]
    with pytest.raises(UsageError, match=message):
        validate(env)


def test_an_unchanged_variant_passes():
    validate(variant())
