"""Experience of the learners in the table: what they take, poison in it, and legal actions."""

from typing import Any

import jax
import numpy as np
from learner_cases import Case, make_rollout

from marl.agents.learner import Rollout
from marl.envs import spaces
from marl.envs.spaces import Box, Discrete, SpaceTree


def make_experience(case: Case, act: Any, state: Any, hparams: Any, seed: int) -> Rollout:
    """What the learner takes: a rollout, or windows, of which one has no weight."""
    rollout = make_rollout(case, act, state, hparams, seed)
    if case.learner().experience == "rollout":
        return rollout
    weight = rollout.weight.copy()
    weight[0, 2] = 0.0  # the first step's is the window's, unless that is a sequence
    return rollout._replace(weight=weight)


def poisoned(case: Case, experience: Rollout) -> Rollout:
    """NaN, or what is no action and no category, in all that has no weight."""
    dead = experience.weight == 0
    learner = case.learner()
    if learner.experience == "replay" and learner.window == 1:
        dead = np.broadcast_to(dead[0], dead.shape)
    junk = {"f": np.nan if case.replaces else 3.0, "b": False}

    def spoil(x: Any) -> np.ndarray:
        x = np.array(x)
        x[dead] = junk.get(x.dtype.kind, 77 if case.replaces else 0)
        return x

    names = ("obs", "action", "action_mask", "extras", "critic_obs", "final_critic_obs")
    names += ("final_obs", "final_action_mask", "context", "next_context")
    changes = {name: jax.tree.map(spoil, getattr(experience, name)) for name in names}
    return experience._replace(reward=np.where(dead, np.nan, experience.reward), **changes)


def is_legal(space: SpaceTree, action: Any, mask: Any) -> bool:
    """Whether a mask allows all choices of actions [..., *space]."""

    def leaf(space: spaces.Space, action: Any, mask: Any) -> bool:
        if isinstance(space, Box):
            return True
        sizes = (space.n,) if isinstance(space, Discrete) else space.nvec
        choices = np.asarray(action).reshape(*mask.shape[:-1], len(sizes))
        starts = np.cumsum((0, *sizes[:-1]))
        return bool(np.all(np.take_along_axis(mask, choices + starts, -1)))

    return all(jax.tree.leaves(spaces.map_spaces(leaf, space, action, mask)))


def counted(function, traces):
    """`function`, which leaves a note whenever it runs in Python."""

    def wrapped(*args):
        traces.append("traced")
        return function(*args)

    return wrapped
