"""Teams of learners with memory: acting, learning, evaluation, policies and resuming carry it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from team_cases import (
    SMOOTH,
    all_finite,
    assert_identical,
    compiled,
    play,
    quick_compilation,  # noqa: F401 (a fixture)
    relative_difference,
    small_team,
    trained,
)
from team_envs import shift

import marl
from marl import experience, learning
from marl import rollout as rollout_of
from marl.envs.vector import VectorEnv
from marl.evaluation import MODES
from marl.policy import Policy
from marl.training import seed_keys

SHIFT = shift(poison=True)  # episodes of 6 steps; agents die, go and come back
SACRIFICE = marl.make("toy/sacrifice")
MEMORY = {"core": "gru", "core_size": 5, "num_epochs": 1, "num_minibatches": 1}
TEAMS = {
    "own": (SHIFT, {}),
    "shared": (SHIFT, {"sharing": "group", "reward_teams": "all"}),
    "joint critic": (SHIFT, {"critic": "all", "reward_teams": "all"}),
    "joint critic, shared": (
        SHIFT,
        {"critic": "all", "reward_teams": "all", "sharing": "group", "core": "lstm"},
    ),
    "one network": (
        SHIFT,
        {"shared_network": True, "sharing": "group", "reward_teams": "all", "sequence_length": 1},
    ),
    "a mix": (SHIFT, {"overrides": {"cid": {"core": "none"}, "ann": {"shared_network": True}}}),
}


def of(name, **options):
    env, own = TEAMS[name]
    return small_team(env, **(MEMORY | own | options))


@pytest.fixture(scope="module", params=TEAMS)
def run(request):
    """A team after four updates, and the metrics of each."""
    team = of(request.param, normalize_observations=request.param == "shared")
    trainer = compiled(team, max_updates=4)
    return team, trainer, *trained(team, trainer, 4)


def test_whoever_learns_is_who_acted(run):
    """The ratio is 1 in the first gradient step of every update: memories, flags and folded batches
    are those of acting, also of agents that were out.
    """
    _, _, state, metrics = run
    assert all_finite(state.team) and all_finite(metrics.learner)
    for found in metrics.learner:
        np.testing.assert_allclose(found["approx_kl"], 0.0, atol=1e-9)
        np.testing.assert_array_equal(found["clip_fraction"], 0.0)


def test_memories_have_a_place_for_every_environment(run):
    team, _, state, _ = run
    for index, group in enumerate(team.lifted.groups):
        of_actors = state.carry.memory[index]
        of_critics = state.critic_memory[index] if state.critic_memory else ()
        config = team.spec.agents[group.positions[0]].config
        num_sets, num_members = group.shape
        batch = 4 if group.joint else 4 * num_members
        shapes = [{x.shape for x in jax.tree.leaves(memory)} for memory in (of_actors, of_critics)]
        has_core = config.core != "none"
        assert shapes[0] == ({(num_sets, num_members, 4, 5)} if has_core else set())
        own = has_core and not config.shared_network
        assert shapes[1] == ({(num_sets, batch, 5)} if own else set())
        assert all(np.any(x != 0) for x in jax.tree.leaves((of_actors, of_critics)))


def test_without_memory_nothing_is_carried():
    team = small_team(SACRIFICE)
    trainer, keys = compiled(team), seed_keys(0, 1)
    state = jax.eval_shape(trainer.init_function, keys, team.group_hparams())
    assert not jax.tree.leaves((state.carry.memory, state.critic_memory))


@pytest.mark.parametrize("name", ["own", "joint critic, shared"])
def test_the_critics_memory_goes_on_where_the_rollout_before_ended(name):
    """Rollouts of 3 and of 2 steps leave what one of 5 does, all of one episode."""
    team = of(name)
    state, rollout = play(team, length=5)
    built = team.lifted.groups

    @jax.jit
    def after(memory, rollout):
        rollout = rollout._replace(critic_memory=memory)
        return learning.next_critic_memories(team.spec, built, state, rollout)

    by_time = set(rollout._fields) - {"memory", "critic_memory", "env_steps", "update", "usable"}
    halves = [
        rollout._replace(
            **{n: jax.tree.map(lambda x, h=h: x[h], getattr(rollout, n)) for n in by_time}
        )
        for h in (slice(3), slice(3, 5))
    ]
    memory = learning.critic_memories(built, 4)
    for half in halves:
        memory = after(memory, half)
    assert relative_difference(memory, after(learning.critic_memories(built, 4), rollout)) <= 1e-5
    forgotten = after(learning.critic_memories(built, 4), halves[1])
    assert relative_difference(memory, forgotten) > 1e-2


@pytest.mark.parametrize(
    "name", ["joint critic, shared", "one network", pytest.param("own", marks=pytest.mark.slow)]
)
def test_vmapped_groups_equal_the_same_team_as_a_loop(name):
    team, looped = (of(name, vectorise=v, **SMOOTH) for v in (True, False))
    one, other = (trained(t, compiled(t), 3)[0] for t in (team, looped))
    for agent in team.agents:
        mine, its = team.agent_state(one.team, agent), looped.agent_state(other.team, agent)
        assert relative_difference(mine, its) <= 1e-5


def test_seeds_are_runs_of_their_own():
    team = of("own", **SMOOTH)
    both, _ = trained(team, compiled(team, num_seeds=2), 2)
    single, _ = trained(team, compiled(team), 2, seed=1)
    second = jax.tree.map(lambda x: x[1], (both.team, both.critic_memory))
    assert relative_difference(second, (single.team, single.critic_memory)) <= 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_a_policy_carries_the_memory_that_acting_does(mode):
    """Step by step over what was seen in a rollout, with episodes that begin in it."""
    team = small_team(SACRIFICE, **MEMORY | {"core": "lstm"})
    state, rollout, expected = played(team)
    policy = Policy(team.env, team.spec, state, team.group_hparams(), mode)
    memory = policy.initial_memory()
    seen = experience.by_position(team.lifted.groups, [steps.obs for steps in rollout.steps])
    for t, begins in enumerate(rollout.reset[:, 0]):
        memory = policy.initial_memory() if begins else memory
        obs = {agent: x[t, 0] for agent, x in zip(team.agents, seen, strict=True)}
        active = dict(zip(team.agents, rollout.active[t, :, 0], strict=True))
        _, memory = policy(jax.random.key(t), obs, memory, active=active)
    assert jax.tree.structure(memory) == jax.tree.structure(expected)  # nothing of critics
    assert relative_difference(memory, expected) <= 1e-5


def played(team, length=6):
    """A fresh team's states, what they did in one environment, and their memories after it."""
    env, hparams = VectorEnv(team.env, 1), team.group_hparams()

    @jax.jit
    def first(key):
        state = team.learner.init(key, hparams)
        carry = rollout_of.start(team.spec, env, key)
        given = key, state, carry, jnp.float32(0.0), hparams
        carry, rollout, *_ = rollout_of.collect(team.spec, env, length, *given)
        return state, rollout, carry.memory

    return first(jax.random.key(0))


def test_resuming_is_exact(tmp_path):
    team = of("joint critic, shared")
    sizes = {"num_envs": 4, "rollout_length": 6, "log_interval": 1, "progress": False}
    whole = marl.train(team.env, team, 96, eval_episodes=2, **sizes)
    marl.train(team.env, team, 48, eval_episodes=2, out=tmp_path / "run", **sizes)
    rest = marl.train(team.env, team, 96, eval_episodes=2, resume=tmp_path / "run", **sizes)
    assert jax.tree.leaves(rest.state.critic_memory)
    for name in ("team", "critic_memory"):
        assert_identical(getattr(rest.state, name), getattr(whole.state, name))
    assert_identical(rest.state.carry.memory, whole.state.carry.memory)


def test_agents_that_learn_in_turn_remember():
    """HAPPO asks for probabilities under new parameters: from the memory before the rollout."""
    options = {"reward_teams": "all", "update_order": "sequential"}
    team = of("own", **options)
    state, metrics = trained(team, compiled(team, max_updates=2), 2)
    assert all_finite(state.team)
    for found in metrics.learner:
        np.testing.assert_allclose(found["approx_kl"], 0.0, atol=1e-9)


def test_who_is_out_keeps_its_memory():
    """And nothing that it might see gets into it."""
    team = small_team(SACRIFICE, **MEMORY)
    policy = Policy(team.env, team.spec, play(team, length=2)[0], team.group_hparams())
    obs = {agent: jnp.ones(space.shape) for agent, space in team.env.observation_spaces.items()}
    _, before = policy(jax.random.key(0), obs)
    nan = {"hero": jnp.full(2, jnp.nan)}
    active = {"hero": False, "friend": True}
    _, after = policy(jax.random.key(1), obs | nan, before, active=active)
    (group,) = team.lifted.groups
    assert group.sets == ((0,), (1,))
    np.testing.assert_array_equal(after[0][0], before[0][0])
    assert all_finite(after) and not np.any(after[0][1] == before[0][1])
