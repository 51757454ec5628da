"""What episodes returned: counted step by step, and for a rollout at once."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl import episodes
from marl.rewards import RewardTeams, Terms

SPEC = SimpleNamespace(
    agents=("a", "b", "c"),
    reward_teams=RewardTeams(("pair", "c"), ((0, 1), (2,)), pooling="sum"),
    terms=Terms(shaped=True),
)
LENGTH, NUM_ENVS = 12, 4


def steps(seed: int, knows_success: bool) -> SimpleNamespace:
    """Environments whose episodes end never, in the last step, in every step, and somewhere."""
    random = np.random.default_rng(seed)
    over = np.zeros((LENGTH, NUM_ENVS), bool)
    over[-1, 1] = over[:, 2] = over[[2, 7], 3] = True
    by_agent = LENGTH, 3, NUM_ENVS
    active = random.random(by_agent) < 0.7
    reward, shaped = (random.integers(-4, 5, by_agent).astype(np.float32) for _ in range(2))
    return SimpleNamespace(
        episode_over=jnp.asarray(over),
        active=jnp.asarray(active),
        reward=jnp.asarray(np.where(active, reward, np.nan)),  # of who is out: never read
        shaped_reward=jnp.asarray(np.where(active, shaped, np.nan)),
        success=jnp.asarray(random.random(over.shape) < 0.5) if knows_success else (),
    )


@pytest.mark.parametrize("knows_success", [True, False])
def test_a_rollout_at_once_is_its_steps_one_by_one(knows_success):
    """Whole numbers, so that every order of adding them gives the same."""
    begun = jax.tree.map(lambda x: x + 3, episodes.start(SPEC, NUM_ENVS))
    played, running = steps(0, knows_success), begun
    totals: dict = {"finished": 0}
    for t in range(LENGTH):
        step = SimpleNamespace(
            **{name: value[t] if len(value) else () for name, value in vars(played).items()}
        )
        running, ended = episodes.after_step(SPEC, running, step)
        over = np.asarray(step.episode_over)
        totals["finished"] += over.sum()
        for name, value in ended._asdict().items():
            if not isinstance(value, tuple):
                totals[name] = totals.get(name, 0) + np.asarray(value)[over].sum(0)
    left, sums = episodes.after_rollout(SPEC, begun, played)
    jax.tree.map(np.testing.assert_array_equal, left, running)
    assert {name for name, x in sums._asdict().items() if not isinstance(x, tuple)} == set(totals)
    for name, total in totals.items():
        np.testing.assert_array_equal(getattr(sums, name), total, err_msg=name)
    assert totals["finished"] == 1 + LENGTH + 2
