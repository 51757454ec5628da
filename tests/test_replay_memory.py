"""Teams with memory that learn from replay: what the ring holds, windows, resuming, the optimum."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from off_policy_cases import learned
from team_cases import (
    SMOOTH,
    agent_states,
    all_finite,
    assert_identical,
    compiled,
    first_state,
    identical,
    play,
    quick_compilation,  # noqa: F401 (a fixture)
    relative_difference,
    trained,
)
from team_envs import shift

import marl
from marl import learning, nonfinite, replay
from marl.agents import ppo
from marl.agents.learner import ActInput
from marl.envs.errors import UsageError
from marl.training import seed_keys

SHIFT = shift()  # episodes of 6 steps; agents die, go and come back
RING = {"capacity": 256, "batch_size": 8, "learning_starts": 16, "updates_per_rollout": 2}
MEMORY = {"core": "gru", "core_size": 5, "sequence_length": 3, "burn_in": 1}
OPTIONS = SMOOTH | {"hidden_sizes": (8,), "replay": RING}


def of(**options):
    return marl.team(SHIFT, "dqn", **(OPTIONS | MEMORY | options))


# The ring


def test_the_ring_holds_what_was_remembered_before_each_step():
    """And a window begins with that of its first step."""
    team = of(sharing="group", core="lstm")
    state, rollout = play(team, num_envs=3, length=7)
    rows = replay.rows_of(rollout)
    (group,) = team.lifted.groups
    memory = rollout.memory[0]
    for t in range(7):
        stored = jax.tree.map(lambda x, t=t: np.moveaxis(x[:, t], 0, 2), rows["memory"][0])
        assert relative_difference(stored, memory) <= 1e-5 if t else not np.any(stored[0])
        steps = rollout.steps[0]
        inputs = dict(reset=rollout.reset[t], active=rollout.active[t].reshape(*group.shape, 3))
        given = ActInput(steps.obs[t], steps.action_mask[t], memory, env_steps=1.0, **inputs)
        keys = jax.random.split(jax.random.key(t), group.shape)
        act = (group, "act_greedy", keys, state[0], given, team.group_hparams()[0])
        memory = learning.act_group(*act).memory
    buffer = replay.make_buffer(team.spec.replay, 3)
    ring = buffer.init(jax.tree.map(lambda x: x[0, 0], rows))
    ring = buffer.add(ring, rows)
    places = jnp.array([[2 * (ring.experience["reward"].shape[1]) + 3 + k for k in range(4)]])
    window = replay.windows_of(replay.taken(ring, places), rollout.env_steps)
    expected = jax.tree.map(lambda x: x[2, 3], rows["memory"])
    assert_identical(jax.tree.map(lambda x: x[:, :, 0], window.memory), expected)
    assert window.reward.shape == (4, 3, 1)
    np.testing.assert_array_equal(window.reward[:, :, 0], rollout.reward[3:, :, 2])


def ring_bytes(team):
    trainer = compiled(team)
    keys = seed_keys(0, 1)
    return replay.num_bytes(
        jax.eval_shape(trainer.init_function, keys, team.group_hparams()).replay
    )


def test_the_size_of_the_ring_counts_memories_of_learners_on_replay():
    for core, numbers in (("gru", 5), ("lstm", 10)):
        assert ring_bytes(of(core=core)) - ring_bytes(of(**NO_MEMORY)) == 256 * 3 * numbers * 4
    on_rollouts = {agent: {"learner": ppo, "core": "gru"} for agent in ("ann", "bob")}
    beside = of(**NO_MEMORY, overrides=on_rollouts)
    assert ring_bytes(beside) == ring_bytes(of(**NO_MEMORY))


NO_MEMORY = {"core": "none", "sequence_length": 0, "burn_in": 0}
UNEQUAL = {"bob": {"sequence_length": 6}, "cid": NO_MEMORY}


def test_windows_are_as_long_as_the_longest_learner_wants():
    team = of(replay=RING | {"n_step": 2}, overrides=UNEQUAL)
    assert team.spec.replay.window == 8 and of(**NO_MEMORY).spec.replay.window == 1
    with pytest.raises(UsageError, match=r"burn_in \+ sequence_length \+ n_step - 1\) = 264, one"):
        team.check((4, 33))
    team.check((4, 32))


def test_every_learner_takes_the_first_steps_that_it_wants():
    """Two, five and eight, for returns of two steps; what is paid in others changes nobody."""
    team = of(replay=RING | {"n_step": 2}, overrides=UNEQUAL)
    states, rollout = play(team, num_envs=6, length=8)
    samples = replay.windows_of(replay.rows_of(rollout), rollout.env_steps)

    @jax.jit
    def after(samples):
        given = team.spec, team.lifted.groups, jax.random.key(1), states, samples
        return agent_states(team, learning.replay_step(*given, team.group_hparams())[0])

    right = after(samples)
    for step, changed in ((1, {"ann", "bob", "cid"}), (4, {"ann", "bob"}), (7, {"bob"})):
        reward = jnp.where(jnp.arange(8)[:, None, None] >= step, 3.0, samples.reward)
        found = after(samples._replace(reward=reward))
        assert {agent for agent in found if not identical(found[agent], right[agent])} == changed


# Training


def test_vmapped_groups_equal_the_same_team_as_a_loop():
    teams = [of(vectorise=v, sharing={"pair": ["ann", "cid"]}) for v in (True, False)]
    one, other = (trained(team, compiled(team), 4)[0] for team in teams)
    fresh = first_state(teams[0], compiled(teams[0]))
    for agent in teams[0].agents:
        mine, its = (
            team.agent_state(x.team, agent) for team, x in zip(teams, (one, other), strict=True)
        )
        assert relative_difference(mine, its) <= 1e-5
        begun = teams[0].agent_state(fresh.team, agent)
        assert relative_difference(mine.network.params, begun.network.params) > 1e-3


def test_what_is_not_finite_in_a_memory_leaves_out_the_window():
    team = of()
    states, rollout = play(team, num_envs=5, length=4)
    steps = rollout.steps[0]
    memory = np.array(steps.memory)
    memory[0, 1, 0, 2] = np.nan  # of bob, where the third window begins
    spoilt = rollout._replace(steps=(steps._replace(memory=jnp.asarray(memory)),))
    samples = replay.windows_of(replay.rows_of(spoilt), rollout.env_steps)
    found = nonfinite.left_out(team.spec, team.lifted.groups, samples)
    expected = np.ones((4, 3, 5), bool)
    expected[:, 1, 2] = False
    np.testing.assert_array_equal(found.usable, expected)
    assert all_finite(jax.jit(partial(learned, team))(states, found))


def test_resuming_is_exact(tmp_path):
    team = of(schedule_steps=1000.0, replay=RING | {"n_step": 2})
    sizes = {"num_envs": 4, "rollout_length": 6, "log_interval": 1, "progress": False}
    sizes["eval_episodes"] = 2
    whole = marl.train(SHIFT, team, 96, **sizes)
    marl.train(SHIFT, team, 48, out=tmp_path / "run", **sizes)
    rest = marl.train(SHIFT, team, 96, resume=tmp_path / "run", **sizes)
    assert any(np.any(x != 0) for x in jax.tree.leaves(rest.state.replay.experience["memory"]))
    assert not identical(whole.state.team, first_state(team, compiled(team)).team)
    for name in ("team", "replay", "carry"):
        assert_identical(getattr(rest.state, name), getattr(whole.state, name))
