"""What tests of learners with Q-critics share: windows of replay, and critics a second time."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from learner_cases import random_mask, relative_difference, sampled, stack, take
from ppo_reference import ReferenceAdam, reference_mlp

from marl.agents.learner import CriticSpace, Rollout
from marl.agents.optimizer import NetworkState
from marl.envs.spaces import Box, Discrete, SpaceTree

STEPS, BATCH = 3, 8
DEAD = 2  # the column without weight
OBSERVATIONS = Box((3,))
CRITIC_SPACE = CriticSpace((Box((3,)), Box((2,))), (Discrete(3), Box((2,), 0.0, 4.0)))
BOX = Box((2,), low=(-1.0, 0.0), high=(1.0, 5.0))


class QCase(NamedTuple):
    """An algorithm bound to spaces; others' actions are `CRITIC_SPACE.context_actions`."""

    algorithm: Any
    config: Any
    action_space: SpaceTree
    masked: bool = False
    hparams: Any = None  # changes to the defaults, a dict


class Bench:
    """A learner, its compiled functions, a state that has learned a little, and windows."""

    def __init__(self, case: QCase):
        self.case = case
        given = case.config, OBSERVATIONS, case.action_space, CRITIC_SPACE
        self.learner = case.algorithm.make(*given)
        self.parts = case.algorithm.make_parts(*given)
        self.init, self.update = jax.jit(self.learner.init), jax.jit(self.learner.update)
        self.hparams = self.with_hparams()
        self.windows = make_windows(case)
        fresh = self.init(jax.random.key(3), self.hparams)
        self.state, _ = self.update(jax.random.key(4), fresh, self.windows, self.hparams)

    def with_hparams(self, **changes: float) -> Any:
        defaults = {"adam_epsilon": 1e-3, "learning_rate": 0.01, "gamma": 0.9, "tau": 0.1}
        given = self.case.algorithm.Hparams(**defaults | (self.case.hparams or {}) | changes)
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), given)

    def after(self, **changes: Any) -> Any:
        """(state, metrics) after one update from windows with other fields."""
        windows = self.windows._replace(**changes)
        return self.update(jax.random.key(0), self.state, windows, self.hparams)


def make_windows(case: QCase, seed: int = 0, batch: tuple[int, int] = (STEPS, BATCH)) -> Rollout:
    """Windows of random steps.

    Column 0 terminates at step 0, column 1 is truncated at step 1, column 3 terminates at its last
    step; column 2 has no weight; column 4 has none at step 1, which does not matter.
    """
    terminated, truncated = np.zeros(batch, bool), np.zeros(batch, bool)
    weight = np.ones(batch, np.float32)
    weight[0, DEAD] = 0.0
    terminated[0, 0] = terminated[-1, 3] = True
    if batch[0] > 1:
        truncated[1, 1] = True
        weight[1, 4] = 0.0

    def masks(seed: int) -> Any:
        return random_mask(seed, case.action_space, batch) if case.masked else None

    return Rollout(
        obs=sampled(seed, OBSERVATIONS, batch),
        action=sampled(seed + 1, case.action_space, batch),
        action_mask=masks(seed + 2),
        extras=(),
        memory=(),
        reset=np.zeros(batch, bool),
        critic_obs=sampled(seed + 3, CRITIC_SPACE.observations, batch),
        final_critic_obs=sampled(seed + 4, CRITIC_SPACE.observations, batch),
        final_obs=sampled(seed + 5, OBSERVATIONS, batch),
        final_action_mask=masks(seed + 6),
        context=sampled(seed + 7, CRITIC_SPACE.context_actions, batch),
        next_context=sampled(seed + 8, CRITIC_SPACE.context_actions, batch),
        reward=np.random.default_rng(seed + 9).normal(size=batch).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        weight=weight,
        advantage=None,
        advantage_weight=None,
        env_steps=np.float32(50.0),
        shuffle_key=jax.random.key(seed),
    )


def poisoned(windows: Rollout) -> Rollout:
    """NaN, or a senseless integer, wherever nobody may read."""
    unread = np.zeros(windows.reward.shape, bool)
    unread[:, DEAD] = True
    unread[1:, 0] = unread[2:, 1] = True  # behind an end
    final = unread.copy()
    final[0, 0] = final[-1, 3] = True  # nothing is worth anything after a terminated step
    not_last = np.ones_like(unread)  # only one final state of a window is read
    not_last[-1] = not_last[1, 1] = False
    now = unread.copy()
    now[1:] = True  # only the first step is learned from

    def spoil(where: np.ndarray, tree: Any) -> Any:
        def leaf(x: Any) -> np.ndarray:
            x = np.array(x)
            if x.dtype != bool:
                x[where] = np.nan if x.dtype.kind == "f" else 77
            return x

        return jax.tree.map(leaf, tree)

    fields = {name: now for name in ("obs", "action", "critic_obs", "context")}
    fields |= {name: final | not_last for name in ("final_obs", "final_critic_obs", "next_context")}
    changes = {name: spoil(where, getattr(windows, name)) for name, where in fields.items()}
    return windows._replace(reward=spoil(unread, windows.reward), **changes)


def live_columns() -> list[int]:
    return [b for b in range(BATCH) if b != DEAD]


def reference_returns(windows: Rollout, gamma: float) -> list[tuple[float, float, int]]:
    """(sum of rewards, discount of the bootstrap, step that it comes from) per column."""
    found = []
    for b in range(windows.reward.shape[1]):
        total, discount, last = 0.0, 1.0, 0
        for t in range(windows.reward.shape[0]):
            total += discount * float(windows.reward[t, b])
            discount *= gamma
            last = t
            if windows.terminated[t, b]:
                discount = 0.0
            if windows.terminated[t, b] or windows.truncated[t, b]:
                break
        found.append((total, discount, last))
    return found


def reference_inputs(critic_obs: Any, context: Any) -> np.ndarray:
    """Critic inputs [..., 10] by hand, before the own action."""
    kind, aim = context
    return np.concatenate([*critic_obs, np.eye(3)[kind], np.asarray(aim) / 2.0 - 1.0], -1)


def scaled(action: Any) -> np.ndarray:
    """Actions of `BOX` in [-1, 1]."""
    return np.stack([action[..., 0], action[..., 1] / 2.5 - 1.0], -1)


def pick(tree: Any, step: Any) -> Any:
    """Rows [columns, ...] of [T, B, ...] at one step per column of the live ones."""
    columns = live_columns()
    steps = [step] * BATCH if isinstance(step, int) else step
    return jax.tree.map(lambda x: np.stack([np.asarray(x)[steps[b], b] for b in columns]), tree)


def reference_critics(params: Any, inputs: Any) -> jax.Array:
    """Outputs [num_critics, ..., choices], one critic after the other."""
    number = jax.tree.leaves(params)[0].shape[0]
    ensemble = [jax.tree.map(lambda x, j=j: x[j], params) for j in range(number)]
    return jnp.stack([reference_mlp(one, inputs) for one in ensemble])


def optimised(network: NetworkState, grads: Any, rate: Any, hparams: Any) -> Any:
    """Parameters after one step of Adam that goes on from where the learner's optimiser is."""
    adam = ReferenceAdam(float(rate), float(hparams.adam_epsilon), float(hparams.max_grad_norm))
    count, m, v = jax.tree.leaves(network.optimizer)
    adam.t, adam.m, adam.v = int(count), np.asarray(m, np.float64), np.asarray(v, np.float64)
    return adam.step(network.params, grads)[0]


def assert_vmap_is_a_loop(bench: Bench, updates: int = 5) -> None:
    """Three agents with their own windows and hparams, after one and after all updates."""
    hparams = [
        bench.with_hparams(learning_rate=rate, gamma=gamma, tau=tau)
        for rate, gamma, tau in [(1e-3, 0.9, 0.1), (3e-3, 0.99, 0.01), (1e-2, 0.5, 0.5)]
    ]
    keys = jax.random.split(jax.random.key(7), len(hparams))
    loop = [bench.init(key, h) for key, h in zip(keys, hparams, strict=True)]
    windows = [make_windows(bench.case, 20 * seed) for seed in range(len(hparams))]
    states = jax.jit(jax.vmap(bench.learner.init))(keys, stack(hparams))
    update = jax.jit(jax.vmap(bench.learner.update))
    for step in range(updates):
        states, _ = update(keys, states, stack(windows), stack(hparams))
        loop = [bench.update(*given)[0] for given in zip(keys, loop, windows, hparams, strict=True)]
        if step in (0, updates - 1):
            for n, expected in enumerate(loop):
                assert relative_difference(take(states, n), expected) <= 1e-5


def bandit(key: jax.Array, action: Any, reward: jax.Array) -> Rollout:
    """Windows of one step that end the episode; observations [1, B, 3] are noise."""
    obs = jax.random.normal(key, (*reward.shape, 3))
    no, yes = jnp.zeros(reward.shape, bool), jnp.ones(reward.shape, bool)
    return Rollout(
        obs=obs,
        action=action,
        action_mask=None,
        extras=(),
        memory=(),
        reset=no,
        critic_obs=obs,
        final_critic_obs=obs,
        final_obs=obs,
        final_action_mask=None,
        context=(),
        next_context=(),
        reward=reward,
        terminated=yes,
        truncated=no,
        weight=jnp.ones(reward.shape),
        advantage=None,
        advantage_weight=None,
        env_steps=jnp.float32(0.0),
        shuffle_key=key,
    )
