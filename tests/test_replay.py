"""When and how often a team learns from replay, resuming, and sizes."""

import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from team_cases import (
    SMOOTH,
    all_finite,
    assert_identical,
    compiled,
    identical,
    quick_compilation,  # noqa: F401 (a fixture)
    relative_difference,
)

import marl
from marl import fitting, program, replay
from marl.agents import dqn, ppo, registry, sac
from marl.binding import REPLAY_OPTIONS
from marl.envs.errors import UsageError
from marl.logging import read_rows
from marl.replay import Replay
from marl.training import seed_keys

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
    with pytest.raises(UsageError, match=r"the replay buffer needs .* bytes and the device has"):
        train(2, team, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 5}, ("replay has no option 'size'", *REPLAY_OPTIONS)),
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


@pytest.mark.parametrize("options", [{"capacity": 1000}, {"capacty": 5}])
def test_sizes_of_a_buffer_that_nobody_uses_are_refused(options):
    noop = {"overrides": {"agent_1": {"learner": "noop"}}}
    with pytest.raises(UsageError) as error:
        marl.team(PROBE, ppo, replay=options, **noop)
    for word in (f"replay = {options}", "(ppo, noop)", "leave replay away", *fitting.ON_REPLAY):
        assert word in str(error.value)
    assert marl.team(PROBE, ppo, replay={}, **noop).spec.replay is None


@pytest.mark.parametrize("learner", registry.ALGORITHMS)
def test_the_learners_on_replay_are_known(learner):
    kind = "continuous" if learner in ("td3", "ddpg") else "both"
    team = marl.team(marl.make(f"toy/probe_{kind}"), learner)
    assert (team.spec.replay is not None) == (learner in fitting.ON_REPLAY)
