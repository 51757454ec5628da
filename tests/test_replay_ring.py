"""The replay buffer of a team: what is stored, and what is drawn from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replay_cases import Ledger
from team_cases import (
    Spy,
    assert_identical,
    compiled,
    first_state,
    play,
    quick_compilation,  # noqa: F401 (a fixture)
)
from team_envs import shift

import marl
from marl import replay
from marl.agents import dqn, ppo, q_learning, sac
from marl.envs.spaces import Discrete
from marl.replay import Replay
from marl.training import seed_keys

# The ring: what is stored, and what is drawn from it

ENVS, LENGTH, ROWS, N_STEP, UPDATES = 2, 4, 8, 3, 5
LINEAR = {"hidden_sizes": (), "gamma": 0.5}  # a network whose values can be worked out by hand


def clock_values(params):
    """Parameters of a linear network that values every action at clock + 1/2 of what was reached.

    [clock, 1, number] is worth clock + 1/2, and [clock, 0, number] 10 less.
    """
    weights = jnp.array([1.0, 10.5, 0.0])

    def leaf(x):
        if x.ndim != 2:
            return jnp.full_like(x, -10.0)
        return jnp.broadcast_to(weights[:, None] if x.shape[0] == 3 else weights, x.shape)

    return jax.tree.map(leaf, params)


def report_samples(learner, state, experience, hparams):
    """The samples, and the targets of a network that is known, where observations are floats."""
    found = {"experience": experience._replace(shuffle_key=())}
    if experience.obs.dtype != jnp.float32:
        return found
    params = clock_values(state.network.params)
    known = state._replace(
        network=state.network._replace(params=params), target_params=jax.tree.map(jnp.copy, params)
    )
    space = Ledger().observation_spaces["ann"]
    parts = q_learning.make_parts("dqn", dqn.Config(hidden_sizes=()), space, Discrete(2))
    return found | {"target": dqn.targets(parts, known, experience, hparams.gamma)}


@pytest.fixture(scope="module")
def ring():
    """After five rollouts of four steps: what is in a ring of eight rows; and samples of each.

    Samples are by agent, [updates, T, B, ...]; the capacity is no multiple of the environments.
    """
    team = marl.team(
        Ledger(),
        Spy(report_samples, learns=False, algorithm=dqn),
        **LINEAR,
        replay={
            "capacity": ENVS * ROWS + 1,
            "batch_size": 200,
            "learning_starts": 0,
            "n_step": N_STEP,
        },
    )
    trainer = compiled(team, ENVS, LENGTH)
    state, metrics = trainer.chunk(first_state(team, trainer), UPDATES)
    samples = {
        agent: jax.tree.map(lambda x: np.asarray(x)[:UPDATES, 0], found)
        for agent, found in zip(team.agents, metrics.learner, strict=True)
    }
    return state, samples


def clocks(samples, agent="ann"):
    """[updates, T, B]: which step of its environment each sample is."""
    return samples[agent]["experience"].obs[..., 0].astype(int)


def test_the_newest_rows_have_taken_the_place_of_the_oldest(ring):
    state, _ = ring
    for steps in state.replay.experience["steps"]:
        obs = np.asarray(steps.obs)
        assert obs.shape == (ENVS, ROWS, 1, 1, 3)
        held = np.sort(obs[:, :, 0, 0, 0], 1)
        np.testing.assert_array_equal(held, [np.arange(12, 20)] * ENVS)
        numbers = obs[:, :, 0, 0, 2]
        assert np.all(numbers == numbers[:, :1]) and numbers[0, 0] != numbers[1, 0]


def test_rows_keep_their_dtypes(ring):
    ann, bob = ring[0].replay.experience["steps"]
    assert ann.obs.dtype == jnp.float32 and bob.obs.dtype == jnp.uint8
    assert ring[0].replay.experience["final_obs"][1].dtype == jnp.uint8
    assert ring[0].replay.experience["terminated"].dtype == bool


def test_images_stay_bytes():
    """Shapes only; nothing compiles."""
    team = marl.team(marl.make("toy/image"), dqn, image_encoder="flatten")
    trainer = compiled(team, 4, 8)
    shapes = jax.eval_shape(trainer.init_function, seed_keys(0, 1), team.group_hparams())
    rows = shapes.replay.experience
    (steps,) = rows["steps"]
    assert steps.obs.dtype == rows["final_obs"][0].dtype == jnp.uint8
    assert steps.obs.shape == (4, Replay().capacity // 4, 2, 1, 4, 4, 1)


def test_a_window_starts_at_every_step_that_has_enough_after_it_and_at_no_other(ring):
    _, samples = ring
    numbers = samples["ann"]["experience"].obs[..., 2]
    for update, found in enumerate(clocks(samples)):
        seen = LENGTH * (update + 1)
        starts = range(max(0, seen - ROWS), seen - N_STEP + 1)
        for number in np.unique(numbers):
            assert set(found[0][numbers[update, 0] == number]) == set(starts)


def test_every_update_draws_anew(ring):
    """The last two are of full rings, and would draw the same places with the same key."""
    _, samples = ring
    starts = clocks(samples)[:, 0]
    places = [starts[update] - starts[update].min() for update in (3, 4)]
    assert np.mean(places[0] == places[1]) < 0.5


def test_windows_are_consecutive_steps_of_one_environment(ring):
    _, samples = ring
    found, numbers = clocks(samples), samples["ann"]["experience"].obs[..., 2]
    np.testing.assert_array_equal(found, found[:, :1] + np.arange(N_STEP)[:, None])
    np.testing.assert_array_equal(numbers, np.broadcast_to(numbers[:, :1], numbers.shape))
    assert len(np.unique(numbers)) == ENVS


def test_all_agents_samples_are_of_the_same_steps(ring):
    _, samples = ring
    ann, bob = (samples[agent]["experience"] for agent in ("ann", "bob"))
    np.testing.assert_array_equal(ann.obs, bob.obs)
    np.testing.assert_array_equal(ann.final_obs, bob.final_obs)
    assert np.any(ann.action != bob.action)


@pytest.mark.parametrize(("agent", "sign"), [("ann", 1), ("bob", -1)])
def test_what_a_row_holds_belongs_together(ring, agent, sign):
    """The reward names the step and the action that it was paid for."""
    _, samples = ring
    rows, step = samples[agent]["experience"], clocks(samples)
    np.testing.assert_array_equal(rows.reward, sign * (step + 1) + 100 * rows.action)
    np.testing.assert_array_equal(rows.terminated, step % 8 == 2)
    np.testing.assert_array_equal(rows.truncated, step % 8 == 7)
    np.testing.assert_array_equal(rows.reset, (step == 0) | (step % 8 == 3) | (step % 8 == 0))
    assert np.all(rows.weight == 1) and rows.critic_obs[0].shape == rows.obs.shape
    assert set(np.unique(rows.action)) == {0, 1}


def test_the_final_observation_is_what_the_step_led_to(ring):
    """Also where it was cut off, and the next row is of another episode; zeros where it ended."""
    _, samples = ring
    rows = samples["ann"]["experience"]
    step, number, goes_on = clocks(samples), rows.obs[..., 2], ~rows.terminated.astype(bool)
    led_to = np.stack([step, np.ones_like(step), number], -1) * goes_on[..., None]
    np.testing.assert_array_equal(rows.final_obs, led_to)
    assert np.all(rows.obs[..., 1] == 0) and np.any(rows.truncated) and not np.all(goes_on)


def test_no_target_crosses_the_end_of_an_episode(ring):
    """By hand: halved rewards up to the end; behind a truncation the value of where it was cut."""
    _, samples = ring
    rows, step = samples["ann"]["experience"], clocks(samples)
    ended = set()
    for update in range(UPDATES):
        for b in range(step.shape[2]):
            expected, factor = 0.0, 1.0
            for t in range(N_STEP):
                c = step[update, t, b]
                expected += factor * rows.reward[update, t, b]
                factor /= 2
                if c % 8 in (2, 7):
                    ended.add((t, c % 8))
                    break
            expected += 0.0 if c % 8 == 2 else factor * (c + 0.5)
            assert samples["ann"]["target"][update, b] == pytest.approx(expected, abs=1e-4)
    assert ended == {(t, c) for t in range(N_STEP) for c in (2, 7)}


# Layouts


@pytest.fixture(scope="module")
def played():
    """Learners on rollouts and on replay; masks, a global state, and agents that come and go."""
    overrides = {
        "ann": {"learner": ppo},
        "bob": {"learner": dqn},
        "cid": {"learner": sac, "critic": ["self", "state"]},
    }
    team = marl.team(shift(), dqn, overrides=overrides)
    return team, play(team, num_envs=3, length=7)[1]


def test_rows_and_windows_are_inverse_layouts(played):
    team, rollout = played
    rows = replay.rows_of(rollout)
    assert all(x.shape[:2] == (3, 7) for x in jax.tree.leaves(rows))
    back = replay.windows_of(rows, rollout.env_steps)
    without = tuple(steps._replace(extras=()) for steps in rollout.steps)
    assert jax.tree.leaves(rollout.steps[0].extras)  # of PPO, which wants them in its own rollout
    assert_identical(back, rollout._replace(steps=without))


def test_a_row_is_one_step_of_one_environment(played):
    """[T, S, N, B, ...] is [B, T, S, N, ...], and [T, A, B] is [B, T, A]."""
    team, rollout = played
    rows, t, b = replay.rows_of(rollout), 4, 2
    for index, steps in enumerate(rollout.steps):
        stored = rows["steps"][index]
        np.testing.assert_array_equal(stored.obs[b, t, 0, 0], steps.obs[t, 0, 0, b])
        np.testing.assert_array_equal(stored.action[b, t, 0, 0], steps.action[t, 0, 0, b])
        np.testing.assert_array_equal(stored.action_mask[b, t, 0, 0], steps.action_mask[t, 0, 0, b])
    np.testing.assert_array_equal(rows["active"][b, t], [True, False, True])
    np.testing.assert_array_equal(rows["reward"][b, t], [5, 0, 300])
    np.testing.assert_array_equal(rows["global_state"][b, :, 0], [0, 1, 2, 3, 4, 5, 0])
    np.testing.assert_array_equal(rows["final_global_state"][b, :, 0], [1, 2, 3, 4, 5, 6, 1])
    np.testing.assert_array_equal(rows["final_action_mask"][1][b, t, 0, 0], [False, True, True])
    np.testing.assert_array_equal(rows["episode_over"][b], np.arange(7) == 5)
    # ann is cut off after six steps, and that is what her last step led to
    np.testing.assert_array_equal(rows["final_obs"][0][b, 5, 0, 0], [1, 7])
    np.testing.assert_array_equal(rows["steps"][0].obs[b, 6, 0, 0], [1, 1])


@pytest.mark.parametrize("steps", [5, 8, 13], ids=["partly full", "full", "wrapped"])
def test_windows_that_are_drawn_at_once_are_those_of_the_buffer(steps):
    """The bits of `buffer.sample` with each key, whatever the ring holds."""
    buffer = replay.make_buffer(Replay(capacity=16, batch_size=4, n_step=3), num_envs=2)
    rows = {"x": jnp.arange(2.0 * steps * 2).reshape(2, steps, 2), "y": jnp.ones((2, steps), bool)}
    state = buffer.init(jax.tree.map(lambda x: x[0, 0], rows))
    for t in range(steps):
        state = buffer.add(state, jax.tree.map(lambda x, t=t: x[:, t : t + 1], rows))
    keys = jax.random.split(jax.random.key(0), 3)
    places = replay.drawn(buffer, state, keys)
    assert places.shape == (3, 4, 3)
    for key, at in zip(keys, places, strict=True):
        assert_identical(replay.taken(state, at), buffer.sample(state, key).experience)
