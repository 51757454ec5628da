"""Critics that the team holds: shared apart from actors, computed once, learned from once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from team_cases import (
    all_finite,
    assert_identical,
    compiled,
    identical,
    play,
    quick_compilation,  # noqa: F401 (a fixture)
    relative_difference,
    small_team,
    trained,
    updater,
)

import marl
from marl import experience
from marl.agents import a2c, ppo
from marl.agents.learner import CriticSpace, Rollout
from marl.dispatch import lift
from marl.envs.errors import UsageError

TRIO = marl.make("toy/roster", names=["a", "b", "c"])
MIXED = marl.make("toy/heterogeneous")  # scout_0, scout_1, pilot, crew
TEAM = {"critic": "all", "reward_teams": "all", "sharing": {"critic": "reward_team"}}


def changed_rewards(rollout):
    """Rewards that differ in every step, agent and environment."""
    noise = jax.random.normal(jax.random.key(3), rollout.reward.shape)
    return rollout._replace(reward=noise)


def networks_of(state):
    """The critic's part of a learner's state."""
    return state.critic, state.critic_obs_statistics, state.value_statistics


@pytest.mark.parametrize("critic", ["self", "all"])
def test_a_critic_that_the_team_holds_learns_what_its_learner_would_have(critic):
    own = small_team(
        TRIO, critic=critic, value_normalization="running", normalize_observations=True
    )
    spec = dataclasses.replace(own.spec, critic_sets=own.spec.sharing_sets)
    held = dataclasses.replace(own, spec=spec)
    (state, rollout), (apart, _) = play(own), play(held)
    rollout = changed_rewards(rollout)
    state, metrics = updater(own)(state, rollout, own.group_hparams())
    apart, apart_metrics = updater(held)(apart, rollout, held.group_hparams())
    actors, critics = apart
    assert actors.critic == () and critics.actor == ()
    assert relative_difference(actors.actor, state[0].actor) <= 1e-5
    assert relative_difference(networks_of(critics), networks_of(state[0])) <= 1e-5
    assert set(metrics[0]) == set(apart_metrics[0])
    assert relative_difference(metrics[0], apart_metrics[0]) <= 1e-4


def test_one_critic_serves_a_reward_team_of_unequal_actors():
    team = small_team(MIXED, **TEAM)
    (critics,) = team.lifted.critics
    assert critics.sets == ((0, 1, 2, 3),) and critics.joint
    assert all(group.held for group in team.lifted.groups)
    state, rollout = play(team)
    rollout = changed_rewards(rollout)
    assert jax.tree.leaves(state[-1].critic.params)[0].shape[0] == 1  # one set of parameters
    after, metrics = updater(team)(state, rollout, team.group_hparams())

    # by hand: the same critic on the team's reward, once per step
    seen = experience.by_position(team.lifted.groups, [steps.obs for steps in rollout.steps])
    final = experience.by_position(team.lifted.groups, rollout.final_obs)
    result = experience.outcome(team.spec.reward_teams, rollout)
    space = CriticSpace(tuple(MIXED.observation_spaces[agent] for agent in team.agents))
    alone = ppo.make_critic(team.spec.agents[0].config, space)
    own = Rollout(**dict.fromkeys(Rollout._fields))._replace(
        critic_obs=tuple(seen),
        final_critic_obs=tuple(final),
        reward=result.reward[:, 0],
        terminated=result.terminated[:, 0],
        truncated=result.truncated[:, 0],
        weight=jnp.mean(rollout.active.astype(jnp.float32), 1),
        env_steps=rollout.env_steps,
        shuffle_key=jax.random.split(jax.random.key(7))[1],
    )
    one = jax.tree.map(lambda x: x[0], state[-1])
    expected, _, found = jax.jit(alone.update)(one, own, team.hparams[0])
    assert relative_difference(jax.tree.map(lambda x: x[0], after[-1]), expected) <= 1e-5
    for group_metrics in metrics:
        np.testing.assert_allclose(group_metrics["value_loss"], found["value_loss"], rtol=1e-4)


def test_every_actor_gets_the_advantages_of_the_critic_they_share():
    """A critic that sees everyone, on one reward, gives its members one advantage."""
    team = small_team(TRIO, **TEAM, normalize_advantages=False)
    state, rollout = play(team)
    rollout = changed_rewards(rollout)
    # equal actors, actions and observations: their updates are equal where advantages are
    same = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), state[0])
    first = rollout.steps[0]._replace(
        **{
            name: jax.tree.map(
                lambda x: jnp.broadcast_to(x[:, :1], x.shape), getattr(rollout.steps[0], name)
            )
            for name in ("obs", "action", "extras")
        }
    )
    rollout = rollout._replace(steps=(first,))
    after, _ = updater(team)((same, *state[1:]), rollout, team.group_hparams())
    for place in (1, 2):
        one, other = (jax.tree.map(lambda x, i=i: x[i], after[0]) for i in (0, place))
        assert relative_difference(one, other) <= 1e-5
    assert not identical(after[0].actor.params, same.actor.params)


@pytest.mark.parametrize(
    ("sharing", "actors", "critics"),
    [
        ({"critic": "reward_team"}, [1, 1, 1], [(0, 1, 2)]),
        ({"critic": "group"}, [1, 1, 1], [(0, 1, 2)]),
        ({"actor": "group", "critic": "none"}, [3], [(0,), (1,), (2,)]),
        ({"actor": {"x": ["a", "b"]}, "critic": {"y": ["b", "c"]}}, [2, 1], [(0,), (1, 2)]),
        ({"actor": "group"}, [3], []),
        ({"actor": "none", "critic": "none"}, [1, 1, 1], []),
        ({"actor": "group", "critic": "group"}, [3], []),
    ],
)
def test_actors_and_critics_are_partitioned_apart(sharing, actors, critics):
    team = small_team(TRIO, sharing=sharing, reward_teams="all")
    assert [len(members) for members in team.spec.sharing_sets] == actors
    assert list(team.spec.critic_sets) == critics
    after, metrics = trained(team, compiled(team, max_updates=1), 1)
    assert all_finite(after.team) and all_finite(metrics.learner)


def test_a_critic_of_a_group_learns_as_it_would_with_shared_actors():
    """Own observation and id, folded: what `sharing="group"` gives its critic."""
    shared = small_team(TRIO, sharing="group")
    apart = small_team(TRIO, sharing={"critic": "group"})
    (state, rollout), (start, _) = play(shared), play(apart)
    rollout = changed_rewards(rollout)
    assert relative_difference(networks_of(state[0]), networks_of(start[-1])) <= 1e-6
    # the same steps, as three sets of one
    steps = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), rollout.steps)
    final = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), rollout.final_obs)
    after, _ = updater(shared)(state, rollout, shared.group_hparams())
    found, _ = updater(apart)(
        start, rollout._replace(steps=steps, final_obs=final), apart.group_hparams()
    )
    assert relative_difference(networks_of(found[-1]), networks_of(after[0])) <= 1e-5


def test_critics_of_equal_structure_are_vmapped_and_equal_the_loop():
    env = marl.make("toy/roster", names=["a", "b", "c", "d"])
    options = {
        "critic": "all",
        "reward_teams": {"x": ["a", "b"], "y": ["c", "d"]},
        "sharing": {"critic": "reward_team"},
        "value_normalization": "popart",
    }
    vmapped, looped = (small_team(env, **options, vectorise=v) for v in (True, False))
    assert [len(group.sets) for group in vmapped.lifted.critics] == [2]
    assert [len(group.sets) for group in looped.lifted.critics] == [1, 1]
    one, other = (trained(team, compiled(team), 5)[0].team for team in (vmapped, looped))
    for index in range(2):
        critic = jax.tree.map(lambda x, i=index: x[i], one[-1])
        mine = jax.tree.map(lambda x: x[0], other[4 + index])
        assert relative_difference(critic, mine) <= 1e-5


def test_a2c_and_seeds():
    team = marl.team(MIXED, "a2c", **TEAM)
    assert team.spec.agents[0].algorithm is a2c
    seeds = compiled(team, num_seeds=2)
    both, _ = trained(team, seeds, 2)
    for seed in range(2):
        single, _ = trained(team, compiled(team), 2, seed=seed)
        mine = jax.tree.map(lambda x, s=seed: x[s], both.team)
        assert relative_difference(mine, single.team) <= 1e-5


def test_resume_is_exact(tmp_path):
    team = small_team(MIXED, **TEAM)
    sizes = {"num_envs": 4, "rollout_length": 8, "log_interval": 1, "progress": False}
    whole = marl.train(MIXED, team, 128, eval_episodes=2, **sizes)
    marl.train(MIXED, team, 64, eval_episodes=2, out=tmp_path / "run", **sizes)
    rest = marl.train(MIXED, team, 128, eval_episodes=2, resume=tmp_path / "run", **sizes)
    assert_identical(rest.state.team, whole.state.team)


def test_describe_shows_them():
    text = small_team(MIXED, **TEAM).describe()
    assert "critics of the team: scout_0, scout_1, pilot, crew" in text
    assert text.count("see the critics of the team below") == 3
    critic = lift(small_team(MIXED, **TEAM).spec).critics[0]
    assert critic.learner.value is not None
    assert "one parameter set shared by 4 agents" in text


BAD = {
    "no word": ({"critic": "team"}, {}, ["sharing.critic = 'team'", "none, group, reward_team"]),
    "words beside": (
        {"critic": "group", "x": ["pilot"]},
        {},
        ["x beside actor and critic", "sharing.actor.x"],
    ),
    "own observations": (
        {"critic": "reward_team"},
        {"reward_teams": "all"},
        ["share a critic", "unequal observations", "critic = 'all'"],
    ),
    "unequal pay": (
        {"critic": {"x": ["scout_0", "crew"]}},
        {"critic": "all"},
        ["scout_0, crew share a critic", "in one reward team"],
    ),
    "nobody to share with": (
        {"critic": "reward_team"},
        {"critic": "all"},
        ["sharing.critic = 'reward_team'", "reward_teams = 'all'"],
    ),
    "unequal gamma": (
        {"critic": "reward_team"},
        TEAM | {"overrides": {"crew": {"gamma": 0.5}}},
        ["scout_0 and crew share a critic", "gamma", "0.99 and 0.5", "{crew: {sharing: {critic"],
    ),
    "unequal learning rate": (
        {"critic": "reward_team"},
        TEAM | {"overrides": {"crew": {"learning_rate": 1e-3}}},
        ["learning_rate * critic_learning_rate_scale"],
    ),
    "unequal learner": (
        {"critic": "reward_team"},
        TEAM | {"overrides": {"crew": {"learner": "a2c"}}},
        ["differ in learner: ppo and a2c"],
    ),
    "no state values": (
        {"critic": "reward_team"},
        {"learner": "dqn", "reward_teams": "all"},
        ["sharing.critic = 'reward_team'", "scout_0", "ppo, a2c"],
    ),
    "memory": (
        {"critic": "reward_team"},
        TEAM | {"core": "gru"},
        ["share a critic apart", "core = 'gru'", "sharing = 'group' or 'none'"],
    ),
    "unknown in an override": (
        "none",
        {"overrides": {"crew": {"sharing": {"critic": "mine"}}}},
        ["sharing of the critic of crew", "'mine'"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_say_what_to_do(case):
    sharing, options, words = BAD[case]
    options = dict(options)
    with pytest.raises(UsageError) as error:
        marl.team(MIXED, options.pop("learner", "ppo"), **(options | {"sharing": sharing}))
    for word in words:
        assert word in str(error.value), str(error.value)


def test_learning_rates_of_actors_may_differ_where_the_critics_is_one():
    rates = {"learning_rate": 5e-4, "critic_learning_rate_scale": 0.5}
    team = marl.team(MIXED, **TEAM, overrides={"crew": rates})
    assert team.spec.critic_sets == ((0, 1, 2, 3),)


def test_an_override_to_a_learner_without_state_values_leaves_the_shared_critic():
    team = small_team(TRIO, **TEAM, overrides={"c": {"learner": "random"}})
    assert team.spec.critic_sets == ((0, 1),)
    after, _ = trained(team, compiled(team, max_updates=1), 1)
    assert all_finite(after.team)


def test_an_override_gives_an_agent_a_critic_of_its_own():
    team = small_team(TRIO, **TEAM, overrides={"c": {"sharing": {"critic": "none"}}})
    assert team.spec.critic_sets == ((0, 1),)
    assert [group.held for group in team.lifted.groups] == [True, False]


def test_an_override_of_the_critic_leaves_the_actor_where_it_is():
    sharing = {"actor": {"x": ["a", "b"]}, "critic": "reward_team"}
    options = TEAM | {"sharing": sharing, "overrides": {"b": {"sharing": {"critic": "none"}}}}
    team = small_team(TRIO, **options)
    assert team.spec.sharing_sets == ((0, 1), (2,))
    assert team.spec.critic_sets == ((0, 2), (1,))


def test_agents_with_one_actor_report_the_mean_of_their_critics():
    team = small_team(TRIO, sharing={"actor": "group", "critic": "none"})
    state, rollout = play(team)
    rollout = changed_rewards(rollout)
    _, metrics = updater(team)(state, rollout, team.group_hparams())
    apart = small_team(TRIO)
    alone, _ = play(apart)
    assert relative_difference(alone[0].critic.params, state[-1].critic.params) <= 1e-6
    steps = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), rollout.steps)
    final = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), rollout.final_obs)
    rollout = rollout._replace(steps=steps, final_obs=final)
    _, own = updater(apart)(alone, rollout, apart.group_hparams())
    mean = np.mean(own[0]["value_loss"])
    np.testing.assert_allclose(metrics[0]["value_loss"], [mean], rtol=1e-4)
    assert np.ptp(own[0]["value_loss"]) > 1e-3


def test_named_critics_are_kept_with_a_run(tmp_path):
    sharing = {"critic": {"x": ["a", "b"]}}
    team = small_team(TRIO, critic="all", reward_teams="all", sharing=sharing)
    sizes = {"num_envs": 4, "rollout_length": 8, "progress": False, "eval_episodes": 2}
    run = marl.train(TRIO, team, 64, out=tmp_path / "run", **sizes)
    found = marl.load(tmp_path / "run")
    assert found.team.spec.critic_sets == team.spec.critic_sets == ((0, 1),)
    assert_identical(found.state.team, run.state.team)
