"""The team's replay buffer: what is in it, what samples of it are, and when it is learned from."""

import shutil
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from team_cases import (
    SMOOTH,
    Spy,
    all_finite,
    assert_identical,
    compiled,
    first_state,
    identical,
    play,
    quick_compilation,  # noqa: F401 (a fixture)
    relative_difference,
)
from team_envs import shift

import marl
from marl import program, replay
from marl.agents import dqn, ppo, q_learning, sac
from marl.envs.errors import UsageError
from marl.envs.interface import TimeStep
from marl.envs.probes import Drawn
from marl.envs.spaces import Box, Discrete
from marl.logging import read_rows
from marl.replay import Replay
from marl.training import seed_keys


@dataclass(frozen=True)
class Ledger:
    """Two agents that see [clock, 0, number of the environment]; the clock is never reset.

    Of every eight steps, step 2 ends an episode by termination and step 7 by truncation. Step c
    leads to [c, 1, number], and pays ann c + 1 and bob -(c + 1), and both 100 more for action 1.
    Bob's observations are bytes.
    """

    agents = ("ann", "bob")

    @property
    def observation_spaces(self):
        return {"ann": Box((3,)), "bob": Box((3,), 0, 255, dtype="uint8")}

    @property
    def action_spaces(self):
        return dict.fromkeys(self.agents, Discrete(2))

    def reset(self, key):
        state = Drawn(jnp.int32(0), jax.random.randint(key, (), 0, 256))
        return self._observe(state, 0), state

    def step(self, key, state, action):
        c = state.step
        end = dict.fromkeys(self.agents, c % 8 == 2), dict.fromkeys(self.agents, c % 8 == 7)
        paid = {agent: sign * (c + 1.0) for agent, sign in (("ann", 1), ("bob", -1))}
        reached = state._replace(step=c + 1)
        timestep = TimeStep(
            obs=self._observe(reached, 0),
            reward={agent: paid[agent] + 100.0 * action[agent] for agent in self.agents},
            terminated=end[0],
            truncated=end[1],
            active=dict.fromkeys(self.agents, jnp.ones((), bool)),
            episode_over=(c % 8 == 2) | (c % 8 == 7),
            final_obs=self._observe(state, 1),
            final_extras=(),
            info=(),
        )
        return timestep, reached

    def action_mask(self, state):
        return None

    def global_state(self, state):
        return None

    def _observe(self, state, final):
        obs = jnp.stack([state.step, jnp.int32(final), state.draw])
        return {"ann": obs.astype(jnp.float32), "bob": obs.astype(jnp.uint8)}


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
    back = replay.windows_of(rows, rollout.memory, rollout.env_steps)
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


# When it is learned from, and how often

PROBE = marl.make("toy/probe_both", num_agents=2)
STEPS = 8  # of one update
SIZES = {"num_envs": 2, "rollout_length": 4, "log_interval": 1, "eval_episodes": 2}
STARTS = {"learning_starts": 20, "updates_per_rollout": 3, "batch_size": 8, "capacity": 24}


def small(**options):
    return marl.team(PROBE, dqn, **{"hidden_sizes": (8,), "replay": STARTS} | SMOOTH | options)


def train(updates, team=None, **options):
    team = small() if team is None else team
    return marl.train(PROBE, team, updates * STEPS, progress=False, **SIZES | options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Six updates, of which the third is the first to learn; a checkpoint after each."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return train(6, out=out, checkpoint_interval=STEPS, keep_checkpoints=9)


@pytest.fixture(scope="module")
def history(whole):
    """The team's state before and after each of five updates, by the same program."""
    trainer = program.program(whole.spec)
    state = trainer.init(seed_keys(0, 1), small().group_hparams())
    states, metrics = [jax.tree.map(np.array, state.team)], []
    for _ in range(5):
        state, found = trainer.chunk(state, 1)
        states.append(jax.tree.map(np.array, state.team))
        metrics.append(jax.tree.map(lambda x: np.array(x[0]), found.learner[0]))
    return states, metrics


def test_nothing_moves_before_learning_starts(history):
    """20 steps are first seen after the third rollout of 8; the buffer could be sampled before."""
    states, metrics = history
    assert_identical(states[0], states[1])
    assert_identical(states[0], states[2])
    assert relative_difference(states[2][0].network.params, states[3][0].network.params) > 1e-3
    for found in metrics[:2]:
        assert found and all(np.all(np.isnan(value)) for value in found.values())
    assert all_finite(metrics[2:])


def test_there_are_as_many_gradient_steps_as_asked_for(history):
    states, _ = history
    steps = [state[0].steps.tolist() for state in states]
    assert steps == [[0, 0], [0, 0], [0, 0], [3, 3], [6, 6], [9, 9]]
    assert not np.array_equal(*jax.tree.leaves(states[3][0].network.params)[-1])  # two agents


def test_rows_have_no_learners_metrics_before_learning_starts(whole):
    names = {"loss", "q_mean", "td_error", "grad_norm", "learning_rate", "epsilon"}
    for row in whole.metrics[:2]:
        assert not [name for name in row if name.split("/")[0] in names]
        assert "return/agent_0" in row
    for row in whole.metrics[2:]:
        for agent in PROBE.agents:
            assert all(np.isfinite(row[f"{name}/{agent}"]) for name in names)


# Resuming and seeds


def without_time(rows):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


@pytest.mark.parametrize("done", [1, 4], ids=["before learning starts", "with a full ring"])
def test_resuming_gives_the_bits_of_an_uninterrupted_run(whole, done, tmp_path):
    """The buffer's rows, and the place of the next one, are part of what is saved."""
    path = tmp_path / "run"
    shutil.copytree(whole.path, path)
    for checkpoint in (path / "checkpoints").iterdir():
        if int(checkpoint.name.split("_")[1]) > done * STEPS:
            shutil.rmtree(checkpoint)
    assert marl.load(path, team=small(), env=PROBE).updates == done
    resumed = train(6, out=path, resume=path)
    assert jax.tree.leaves(whole.state.replay) and bool(whole.state.replay.is_full)
    assert_identical(resumed.state, whole.state)
    assert without_time(resumed.metrics) == without_time(whole.metrics)
    assert without_time(read_rows(path / "metrics.jsonl")) == without_time(whole.metrics)


def test_three_vmapped_seeds_equal_three_runs(whole):
    """Initial states, keys and buffers have the same bits; then at most 1e-5 apart."""
    team = small(schedule_steps=1000)

    def of(num_seeds, seed):
        trainer = program.program(whole.spec._replace(num_seeds=num_seeds))
        state = trainer.init(seed_keys(seed, num_seeds), team.group_hparams())
        states = [jax.tree.map(jnp.copy, state)]
        for _ in range(7):
            state, _ = trainer.chunk(state, 1)
            states.append(jax.tree.map(jnp.copy, state))
        return states[0], states[3], states[7]  # the third update is the first to learn

    vmapped = of(3, 4)
    for index in range(3):
        single = of(1, 4 + index)
        start, three, seven = (jax.tree.map(lambda x, i=index: x[i], state) for state in vmapped)
        assert_identical((start.key, start.team), (single[0].key, single[0].team))
        assert_identical(three.replay, single[1].replay)
        for mine, theirs in ((three, single[1]), (seven, single[2])):
            assert_identical((mine.key, mine.update), (theirs.key, theirs.update))
            assert_identical(mine.carry.obs, theirs.carry.obs)
            assert relative_difference(mine.team, theirs.team) <= 1e-5
        assert three.team[0].steps.tolist() == [3, 3] and seven.team[0].steps.tolist() == [15, 15]
    assert not identical(vmapped[0].team, jax.tree.map(lambda x: x[::-1], vmapped[0].team))


# Sizes


def replay_shapes(env, team, num_envs=4, rollout_length=8, num_seeds=1) -> Any:
    trainer = compiled(team, num_envs, rollout_length, num_seeds=num_seeds)
    keys = seed_keys(0, num_seeds)
    return jax.eval_shape(trainer.init_function, keys, team.group_hparams()).replay


def test_a_centralised_critic_stores_nothing_more():
    """Shapes only; what critics read of other agents is put together from samples."""
    env = marl.make("toy/probe_continuous", num_agents=10)
    sizes = {"capacity": 1000}
    own, joint = (
        replay.num_bytes(replay_shapes(env, marl.team(env, sac, critic=critic, replay=sizes)))
        for critic in ("self", "all")
    )
    assert own == joint
    # obs, final_obs, action, reward: floats; four flags of each agent; two of the environment
    index = 4 + 1
    assert own == 1000 * (10 * (4 * 4 + 4) + 2) + index


def test_bytes_count_every_seed_and_grow_with_the_capacity():
    team = small()
    one, three = (replay.num_bytes(replay_shapes(PROBE, team, num_seeds=seeds)) for seeds in (1, 3))
    assert three == 3 * one
    double = small(replay=STARTS | {"capacity": 48})
    assert replay.num_bytes(replay_shapes(PROBE, double)) == pytest.approx(2 * one, abs=8)


@pytest.mark.parametrize(
    ("needed", "available", "fits"),
    [(10, 10, True), (10, 11, True), (10**15, None, True), (11, 10, False), (3000, 2048, False)],
)
def test_check_memory(needed, available, fits):
    if fits:
        replay.check_memory(needed, available)
        return
    with pytest.raises(UsageError) as error:
        replay.check_memory(needed, available)
    for word in (f"{needed:,} bytes", f"{available:,}", "replay.capacity", "num_seeds"):
        assert word in str(error.value)


def test_the_available_memory_is_that_of_a_machine():
    found = replay.available_memory()
    assert found is None or 10**8 < found < 10**15


def test_a_buffer_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    """Before anything is compiled or allocated, too."""
    if replay.available_memory() is None:
        pytest.skip("this machine does not say how much memory it has")
    team = small(replay={"capacity": 10**15})
    with pytest.raises(UsageError, match=r"the replay buffer needs .* bytes and .* are free"):
        train(2, team, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 5}, ("replay has no option 'size'", *Replay._fields)),
        ({"capacty": 5}, ("'capacty'", "capacity")),
        ({"capacity": 10.5}, ("replay.capacity = 10.5", "whole number")),
        ({"batch_size": "many"}, ("replay.batch_size = 'many'", "whole number")),
        ({"n_step": True}, ("replay.n_step = True", "whole number")),
        ({"n_step": None}, ("replay.n_step = None", "whole number")),
        ({"capacity": float("inf")}, ("replay.capacity = inf", "whole number")),
        ({"capacity": float("nan")}, ("replay.capacity = nan", "whole number")),
    ],
)
def test_options_that_are_none_are_refused_by_name(options, words):
    with pytest.raises(UsageError) as error:
        marl.team(PROBE, dqn, replay=options)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity": 7}, ("replay.capacity = 7", "= 8", "one rollout", "give more")),
        ({"capacity": 9, "n_step": 5}, ("replay.capacity = 9", "= 10", "n_step")),
        ({"capacity": 0}, ("replay.capacity = 0", "1 or more")),
        ({"batch_size": 0}, ("replay.batch_size = 0", "1 or more")),
        ({"updates_per_rollout": 0}, ("replay.updates_per_rollout = 0", "1 or more")),
        ({"learning_starts": -1}, ("replay.learning_starts = -1", "0 or more")),
        ({"n_step": 0}, ("replay.n_step = 0", "1 or more")),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_anything_is_written(options, words, tmp_path):
    with pytest.raises(UsageError) as error:
        train(2, small(replay=options), out=tmp_path / "run")
    for word in words:
        assert word in str(error.value)
    assert not (tmp_path / "run").exists()


def test_sizes_that_just_fit_are_taken():
    Replay(capacity=8, n_step=4, learning_starts=0).check(num_envs=2, rollout_length=4)
    assert marl.team(PROBE, dqn, replay={"capacity": 1e3}).spec.replay == Replay(capacity=1000)
    assert Replay(capacity=17).rows(num_envs=2) == 8


def test_only_teams_that_want_a_buffer_have_one():
    assert marl.team(PROBE, ppo).spec.replay is None
    assert marl.team(PROBE, dqn).spec.replay == Replay()
    mixed = marl.team(PROBE, ppo, overrides={"agent_1": {"learner": dqn}})
    assert mixed.spec.replay == Replay()
