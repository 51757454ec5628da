"""The learners that every contract is checked on, and rollouts to check them with."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import learner_floats
import numpy as np
import on_policy_cases
from case import Case, act_input, random_mask, random_memory, sampled

from marl.agents import ddpg, dqn, fixed, pqn, sac, td3
from marl.agents.learner import Rollout
from marl.envs.spaces import Box, Discrete, MultiDiscrete, SpaceTree

_SPACE, _BOX = Box((3,)), Box((2,), low=(-1.0, 0.0), high=(1.0, 5.0))
_ACTIONS = {
    "aim": Box((2,), -1.0, 1.0),
    "go": Box((1,)),
    "move": MultiDiscrete((2, 3)),
    "talk": Discrete(3),
}
_OTHERS = (Discrete(3), Box((2,), 0.0, 4.0))
_TD3_SCHEDULES = {"learning_rate_schedule": "linear", "exploration_schedule": "linear"}
_LINEAR = {"learning_rate_schedule": "linear"}


def _q_case(algorithm: Any, action_space: SpaceTree, floats: Any, **config: Any) -> Case:
    """Of a learner with Q-critics that read other agents' actions."""
    return Case(
        algorithm,
        algorithm.Config(hidden_sizes=(8,), **config),
        observation_space=_SPACE,
        action_space=action_space,
        critic_observations=(_SPACE, Box((2,))),
        masked=isinstance(action_space, Discrete),
        context_actions=_OTHERS,
        floats=floats,
    )


def _fixed_case(algorithm: Any, explores: bool) -> Case:
    return Case(
        algorithm,
        algorithm.Config(),
        observation_space=_SPACE,
        action_space=_ACTIONS,
        critic_observations=(),
        masked=True,
        learns=False,
        explores=explores,
        greedy=not explores,
    )


CASES = {
    **on_policy_cases.CASES,
    "dqn": Case(
        dqn,
        dqn.Config(hidden_sizes=(8,), dueling=True, target_update_interval=2, **_LINEAR),
        observation_space=_SPACE,
        action_space=Discrete(4),
        critic_observations=(),
        masked=True,
        floats={**learner_floats.EPSILON_GREEDY, "tau": (0.1, 0.01, 0.5)},
    ),
    "dqn-gru": Case(
        dqn,
        dqn.Config(
            hidden_sizes=(8,), core="gru", core_size=6, sequence_length=3, burn_in=1, **_LINEAR
        ),
        observation_space=_SPACE,
        action_space=Discrete(4),
        critic_observations=(),
        masked=True,
        floats={**learner_floats.EPSILON_GREEDY, "tau": (0.1, 0.01, 0.5)},
    ),
    "pqn": Case(
        pqn,
        pqn.Config(num_epochs=2, num_minibatches=2, hidden_sizes=(8,), **_LINEAR),
        observation_space=_SPACE,
        action_space=Discrete(4),
        critic_observations=(),
        masked=True,
        floats={**learner_floats.EPSILON_GREEDY, "q_lambda": (0.65, 0.9, 0.3)},
    ),
    "pqn-lstm": Case(
        pqn,
        pqn.Config(
            num_epochs=2,
            num_minibatches=2,
            dueling=True,
            hidden_sizes=(8, 6),
            core="lstm",
            core_size=5,
            sequence_length=3,
            burn_in=1,
            **_LINEAR,
        ),
        observation_space=_SPACE,
        action_space=Discrete(4),
        critic_observations=(),
        masked=True,
        floats={**learner_floats.EPSILON_GREEDY, "q_lambda": (0.65, 0.9, 0.3)},
    ),
    "sac-box": _q_case(
        sac, _BOX, {**learner_floats.SAC, "target_entropy_scale": (1.0, 0.5, 2.0)}, **_LINEAR
    ),
    "sac-discrete": _q_case(
        sac,
        Discrete(4),
        {**learner_floats.SAC, "discrete_target_entropy_scale": (0.5, 0.9, 0.2)},
        **_LINEAR,
    ),
    "td3": _q_case(td3, _BOX, learner_floats.NOISY, **_TD3_SCHEDULES),
    "ddpg": _q_case(ddpg, _BOX, learner_floats.NOISY, **_TD3_SCHEDULES),
    "random": _fixed_case(fixed.random, explores=True),
    "noop": _fixed_case(fixed.noop, explores=False),
}


def make_rollout(
    case: Case,
    act: Any,
    state: Any,
    hparams: Any,
    seed: int = 0,
    batch: tuple[int, int] = (6, 4),
    critic_batch: tuple[int, int] | None = None,
) -> Rollout:
    """A rollout that `act` chose the actions of, step by step (one program if it is jitted).

    Column 0 terminates at step 2 and is dead at steps 3 and 4 (observations zero, weight 0), column
    1 is truncated at step 3; all are cut at the rollout's end. Episodes start in column 1 at step 4
    and in column 2 at step 0.
    """
    T, B = batch
    critic_batch = critic_batch or batch
    terminated, truncated = np.zeros(batch, bool), np.zeros(batch, bool)
    terminated[2, 0] = truncated[3, 1] = True
    weight = np.ones(batch, np.float32)
    weight[3:5, 0] = 0.0
    obs = sampled(seed, case.observation_space, batch)
    for leaf in jax.tree.leaves(obs):
        leaf[weight == 0] = 0
    mask = random_mask(seed, case.action_space, batch) if case.masked else None
    reset = np.zeros(batch, bool)
    reset[4, 1] = reset[0, 2] = True
    learner = case.learner()
    memory = first_memory = random_memory(seed + 8000, learner.initial_memory, B)
    steps = []
    for t, key in enumerate(jax.random.split(jax.random.key(seed), T)):
        inputs = act_input(*take((obs, mask), t), memory, reset[t], weight[t] > 0)
        steps.append(act(key, state, inputs, hparams))
        memory = steps[-1].memory
    acted = stack([step._replace(memory=()) for step in steps])
    return Rollout(
        obs=obs,
        action=acted.action,
        action_mask=mask,
        extras=acted.extras,
        memory=first_memory,
        reset=reset,
        critic_obs=sampled(seed + 1000, case.critic_observations, critic_batch),
        final_critic_obs=sampled(seed + 2000, case.critic_observations, critic_batch),
        final_obs=sampled(seed + 4000, case.observation_space, batch),
        final_action_mask=(
            random_mask(seed + 5000, case.action_space, batch) if case.masked else None
        ),
        context=sampled(seed + 6000, case.context_actions, batch),
        next_context=sampled(seed + 7000, case.context_actions, batch),
        reward=np.random.default_rng(seed + 3000).normal(size=batch).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        weight=weight,
        advantage=None,
        advantage_weight=None,
        env_steps=np.float32(50.0),
        shuffle_key=jax.random.key(seed + 1),
        critic_memory=random_memory(seed + 9000, learner.critic_memory, critic_batch[1]),
    )


def stack(trees: Sequence[Any]) -> Any:
    """Trees to one tree with a leading axis, in NumPy but for keys."""

    def leaf(*xs: Any) -> Any:
        keys = jnp.issubdtype(xs[0].dtype, jax.dtypes.prng_key)
        return jnp.stack(xs) if keys else np.stack([np.asarray(x) for x in xs])

    return jax.tree.map(leaf, *trees)


def take(tree: Any, index: int) -> Any:
    """Element `index` of the leading axis of every array, in NumPy."""
    return jax.tree.map(lambda x: np.asarray(x)[index], tree)


def relative_difference(one: Any, other: Any) -> float:
    """Largest difference over a leaf divided by the leaf's largest element; NaN counts as inf."""

    def leaf(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if not a.size:
            return 0.0
        difference = np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-12)
        return float("inf") if np.isnan(difference) else float(difference)

    return max(jax.tree.leaves(jax.tree.map(leaf, one, other)), default=0.0)


def assert_identical(one: Any, other: Any) -> None:
    """The same structure and the same bits."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def all_finite(tree: Any) -> bool:
    return all(bool(np.all(np.isfinite(np.asarray(x)))) for x in jax.tree.leaves(tree))
