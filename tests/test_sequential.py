"""Updates one agent after another: order, importance weights, and returns that never fall."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from team_cases import (
    agent_states,
    assert_identical,
    compiled,
    first_state,
    identical,
    play,
    quick_compilation,  # noqa: F401 (a fixture)
    relative_difference,
    small_team,
    trained,
    updater,
)

import marl
from marl import experience, sequential
from marl.agents.learner import Rollout
from marl.envs.errors import UsageError
from marl.envs.games import shared_game
from marl.envs.interface import AutoReset
from marl.program import _step_seeds

MIXED = marl.make("toy/heterogeneous")  # scout_0, scout_1, pilot, crew: three groups
TRIO = marl.make("toy/roster", names=["a", "b", "c"])  # one group
UNLIKE = {"overrides": {"b": {"hidden_sizes": [4]}}}  # a and c one group, b another
HAPPO = {"reward_teams": "all", "update_order": "sequential"}


def order_of(number, size):
    return list(np.asarray(sequential.order(jnp.int32(number), size)))


def test_the_order_is_fresh_each_update():
    orders = {tuple(order_of(number, 4)) for number in range(20)}
    assert len(orders) > 10
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)


@pytest.mark.parametrize("env", [TRIO, MIXED], ids=["equal agents", "unequal agents"])
def test_each_agent_is_weighted_by_what_those_before_it_changed(env):
    team = small_team(env, **HAPPO)
    state, rollout = play(team)
    noise = jax.random.normal(jax.random.key(3), rollout.reward.shape)
    rollout = rollout._replace(reward=noise, update=jnp.int32(3))
    found, _ = updater(team)(state, rollout, team.group_hparams())

    # by hand: one agent's learner after the other, in the order of update 3
    key, shuffle = jax.random.split(jax.random.key(7))
    result = experience.outcome(team.spec.reward_teams, rollout)
    built = team.lifted.groups
    seen = experience.Seen(
        experience.by_position(built, [steps.obs for steps in rollout.steps]),
        experience.by_position(built, rollout.final_obs),
        (),
        (),
    )
    sets = [(i, s) for i, group in enumerate(built) for s in range(len(group.sets))]
    turns = sorted(sets, key=lambda turn: built[turn[0]].sets[turn[1]])
    log_ratio = 0.0
    for turn in order_of(3, len(turns)):
        index, s = turns[turn]
        group = built[index]
        (position,) = group.sets[s]
        own, axes = experience.of_group(group, rollout, index, result, seen, shuffle, {})
        own = jax.tree.map(
            lambda axis, x, s=s: x if axis is None else jax.tree.map(lambda y: y.take(s, axis), x),
            axes,
            own,
            is_leaf=lambda x: x is None,
        )
        own = own._replace(advantage_weight=jnp.exp(log_ratio) * jnp.ones_like(own.weight))
        before = jax.tree.map(lambda x, s=s: x[s], state[index])
        hparams = jax.tree.map(jnp.float32, team.hparams[position])
        key_own = jax.random.fold_in(key, position)
        after, _ = jax.jit(group.learner.update)(key_own, before, own, hparams)
        log_prob = jax.jit(group.learner.log_prob)
        log_ratio = log_ratio + log_prob(after, own) - log_prob(before, own)
        mine = jax.tree.map(lambda x, s=s: x[s], found[index])
        assert relative_difference(mine, after) <= 1e-5
    assert float(jnp.max(jnp.abs(log_ratio))) > 1e-3  # the weights were not all 1


def test_it_is_another_update_than_at_once():
    one, other = (
        small_team(TRIO, **(HAPPO | {"update_order": o})) for o in ("sequential", "simultaneous")
    )
    state, rollout = play(one)
    rollout = rollout._replace(reward=jax.random.normal(jax.random.key(3), rollout.reward.shape))
    hparams = one.group_hparams()
    (in_turn, _), (at_once, _) = (updater(team)(state, rollout, hparams) for team in (one, other))
    first = order_of(0, 3)[0]
    for s in range(3):
        mine, yours = (
            jax.tree.map(lambda x, s=s: x[s], found[0].actor.params) for found in (in_turn, at_once)
        )
        # who goes first is weighted by 1
        close = relative_difference(mine, yours) <= 1e-5
        assert close == (s == first)


def test_agents_alone_in_their_team_are_weighted_by_one():
    env = marl.make("toy/roster", names=["a", "b", "c", "d"])
    teams = {"x": ["a", "b"], "y": ["c"], "z": ["d"]}
    one, other = (
        small_team(env, reward_teams=teams, update_order=order)
        for order in ("sequential", "simultaneous")
    )
    state, rollout = play(one)
    rollout = rollout._replace(reward=jax.random.normal(jax.random.key(3), rollout.reward.shape))
    hparams = one.group_hparams()
    found = [agent_states(team, updater(team)(state, rollout, hparams)[0]) for team in (one, other)]
    equal = {a: relative_difference(found[0][a], found[1][a]) <= 1e-5 for a in one.agents}
    assert equal["c"] and equal["d"]
    assert not (equal["a"] and equal["b"])


def test_inactive_steps_do_not_count():
    """Whatever an agent did where it was out: nobody's update knows of it."""
    team = small_team(TRIO, **HAPPO)
    state, rollout = play(team)
    noise = jax.random.normal(jax.random.key(3), rollout.reward.shape)
    out = rollout.active.at[3:6, 0].set(False)
    rollout = rollout._replace(reward=noise, active=out)
    (steps,) = rollout.steps

    def change(x):
        return x.at[3:6, 0].set(1 - x[3:6, 0])

    extras = steps.extras | {"raw": jax.tree.map(change, steps.extras["raw"])}
    changed = steps._replace(action=jax.tree.map(change, steps.action), extras=extras)
    assert not identical(changed.action, steps.action)
    other = rollout._replace(steps=(changed,))
    update = updater(team)
    one, two = (update(state, r, team.group_hparams())[0] for r in (rollout, other))
    assert_identical(one, two)


def test_seeds_share_the_order_and_equal_single_runs():
    team = small_team(MIXED, **HAPPO)
    both, _ = trained(team, compiled(team, num_seeds=2), 3)
    single = compiled(team)
    for seed in range(2):
        alone, _ = trained(team, single, 3, seed=seed)
        mine = jax.tree.map(lambda x, s=seed: x[s], both.team)
        assert relative_difference(mine, alone.team) <= 1e-5


def test_vmapped_seeds_run_one_branch_of_the_groups():
    """A batched index would turn the switch into a select over all branches."""
    team = small_team(MIXED, **HAPPO)
    trainer = compiled(team, num_seeds=2)
    state = jax.eval_shape(
        trainer.init_function, jax.random.split(jax.random.key(0), 2), team.group_hparams()
    )
    text = str(jax.make_jaxpr(partial(_step_seeds, trainer.spec))(state))
    at_once = compiled(small_team(MIXED, reward_teams="all"), num_seeds=2)
    plain = str(jax.make_jaxpr(partial(_step_seeds, at_once.spec))(state))
    assert text.count(" cond[") == plain.count(" cond[") + 1
    assert len(sequential.which(team.spec, team.lifted.groups)) == 3


def test_the_order_does_not_depend_on_the_grouping():
    """One, other, one: vmapped, the first and the last are a group, and keep their turns."""
    one, other = (small_team(TRIO, **HAPPO, **UNLIKE, vectorise=v) for v in (True, False))
    assert [len(t.lifted.groups) for t in (one, other)] == [2, 3]
    found = [agent_states(t, trained(t, compiled(t), 3)[0].team) for t in (one, other)]
    for agent in one.agents:
        assert relative_difference(found[0][agent], found[1][agent]) <= 1e-5


def exact(logits, payoff):
    """The joint return of independent softmax policies."""
    rows, columns = (np.exp(x) / np.exp(x).sum() for x in logits)
    return float(rows @ payoff @ columns)


def policies(team, state, obs):
    """Logits of both agents."""
    found = []
    for agent in team.agents:
        own = team.agent_state(state, agent)
        bound = team.lifted.groups[0].learner
        values = [float(bound.log_prob(own, one_action(obs, action))[0, 0]) for action in range(3)]
        found.append(np.array(values))
    return found


def one_action(obs, action):
    empty = Rollout(**dict.fromkeys(Rollout._fields))
    acted = jnp.full((1, 1), action)
    return empty._replace(
        obs=obs, action=acted, extras={"raw": (acted,), "log_prob": jnp.zeros((1, 1))}
    )


GAMES = {
    "climbing": marl.make("toy/climbing"),
    "penalty": marl.make("toy/penalty"),
    # the best answers to a player who draws evenly are 0 and 0, and together the worst but one
    "collision": AutoReset(shared_game(((-1.0, 3.0, 0.0), (3.0, -2.0, 0.0), (0.0, 0.0, 0.0)))),
}


@pytest.mark.parametrize("game", GAMES)
def test_the_exact_joint_return_never_falls(game):
    """A matrix game, its batch enumerated: every joint action, weighted by its probability.

    With exact advantages each agent's surrogate is the change of the joint return, given what
    those before it changed: it rises, whoever goes first. In the last game it falls by 0.1 in one
    update without these weights.
    """
    env = GAMES[game]
    options = {
        "num_epochs": 20,
        "num_minibatches": 1,
        "normalize_advantages": False,
        "entropy_coef": 0.0,
        "learning_rate": 1e-2,
        "clip_epsilon": 0.5,
        "max_grad_norm": float("inf"),
        "hidden_sizes": (8,),
    }
    team = marl.team(env, "ppo", **options, **HAPPO)
    payoff = np.asarray(env.env.rows, np.float64)
    (group,) = team.lifted.groups
    state, rollout = play(team, num_envs=9, length=1)
    obs = jax.tree.map(lambda x: x[:1, 0, 0, :1], rollout.steps[0].obs)
    joint = jnp.asarray([(a, b) for a in range(3) for b in range(3)])
    returns = []

    @jax.jit
    def turn(state, log_probs, number):
        probability = jnp.exp(log_probs[0][joint[:, 0]] + log_probs[1][joint[:, 1]])
        reward = jnp.asarray(payoff, jnp.float32)[joint[:, 0], joint[:, 1]]
        advantage = reward - jnp.sum(probability * reward)
        acted = joint.T[None, :, None, :]  # [T, S, N, B]
        extras = {
            "log_prob": jnp.stack([log_probs[i][joint[:, i]] for i in range(2)])[None, :, None],
            "raw": (acted,),
        }
        steps = rollout.steps[0]._replace(action=acted, extras=extras)
        result = experience.outcome(team.spec.reward_teams, rollout)
        seen = experience.Seen(
            experience.by_position((group,), [steps.obs]),
            experience.by_position((group,), rollout.final_obs),
            (),
            (),
        )
        own, axes = experience.of_group(
            group, rollout._replace(steps=(steps,)), 0, result, seen, jax.random.key(0), {}
        )
        spread = jnp.broadcast_to(probability, own.weight.shape)
        own = own._replace(weight=spread, advantage=jnp.broadcast_to(advantage, own.weight.shape))
        axes = axes._replace(advantage=1)
        return sequential.update(
            team.spec,
            (group,),
            jax.random.key(1),
            number,
            (1, 9),
            state,
            {0: (own, axes)},
            team.group_hparams(),
        ).states

    for number in range(60):
        logits = policies(team, state, obs)
        returns.append(exact(logits, payoff))
        learned = turn(state, [jnp.asarray(x, jnp.float32) for x in logits], jnp.int32(number))
        state = (learned[0],)
    changes = np.diff(returns)
    assert returns[-1] > returns[0] + 0.5, returns[-1]
    assert changes.min() >= -1e-4, changes.min()


def test_somebody_must_be_able_to_take_turns():
    with pytest.raises(UsageError, match=r"update_order = 'sequential'.*reward_teams = 'all'"):
        marl.team(TRIO, "ppo", update_order="sequential")
    with pytest.raises(UsageError, match=r"\(a: dqn, b: dqn, c: ppo\); give two of a team ppo"):
        marl.team(TRIO, "dqn", **HAPPO, overrides={"c": {"learner": "ppo"}})
    with pytest.raises(UsageError, match=r"a, b, c share one actor, .* sharing.actor = 'none'"):
        marl.team(TRIO, "ppo", **HAPPO, sharing="group")
    with pytest.raises(UsageError, match="and a, b share one actor"):
        overrides = {"c": {"learner": "dqn"}}
        marl.team(TRIO, "ppo", **HAPPO, sharing={"us": ["a", "b"]}, overrides=overrides)
    with pytest.raises(UsageError, match=r"each of reward_teams has one agent \(x: a, y: b\)"):
        teams = {"x": ["a"], "y": ["b"]}
        marl.team(TRIO, "ppo", update_order="sequential", reward_teams=teams)
    with pytest.raises(UsageError, match="one agent, agent_0; leave update_order at 'simul"):
        marl.team(marl.make("toy/probe_memory"), "ppo", **HAPPO)
    with pytest.raises(UsageError, match="choose from simultaneous, sequential"):
        marl.team(TRIO, "ppo", update_order="random")


def test_mixed_teams_take_turns_where_they_can():
    """Learners without policies from rollouts learn as ever, beside those that take turns."""
    overrides = {"crew": {"learner": "random"}, "pilot": {"learner": "a2c"}}
    team = marl.team(MIXED, "ppo", **HAPPO, overrides=overrides)
    turns = sequential.which(team.spec, team.lifted.groups)
    agents = {team.agents[p] for i in turns for p in team.lifted.groups[i].positions}
    assert agents == {"scout_0", "scout_1", "pilot"}
    trainer = compiled(team, max_updates=1)
    before = first_state(team, trainer)
    before = jax.tree.map(jnp.copy, before.team)
    after, _ = trained(team, trainer, 1)
    for index, group in enumerate(team.lifted.groups):
        learns = team.agents[group.positions[0]] != "crew"
        assert identical(after.team[index], before[index]) != learns
