"""Memory under VDN and QMIX: sequences of a team, against a second implementation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mixing_cases import BLIND, ENV, PAIR, given_for, mixed_team
from team_cases import (
    agent_states,
    all_finite,
    assert_identical,
    compiled,
    quick_compilation,  # noqa: F401 (a fixture)
    relative_difference,
    trained,
)
from test_decomposition import alone, assert_alone
from test_mixing import as_loop, repeated

import marl
from marl import mixing
from marl.agents import dqn, pqn, returns
from marl.envs.errors import UsageError

TOLERANCE = 2e-5
LENGTH = 6
MEMORY = {"core": "gru", "core_size": 4, "num_epochs": 1}


def remembering(given):
    """The same with memories in the middle of episodes, and flags of where episodes begin."""
    generator = np.random.default_rng(1)
    rollout = given.rollout
    memory = jax.tree.map(lambda x: generator.normal(size=x.shape).astype("f"), rollout.memory)
    reset = generator.random(rollout.reset.shape) < 0.3
    assert 2 < reset.sum() < reset.size - 2
    return given._replace(rollout=rollout._replace(memory=memory, reset=reset))


def of(mixer="vdn", env=ENV, **options):
    team = mixed_team(env, pqn, mixer, **(MEMORY | options))
    return remembering(given_for(team, LENGTH))


def member(given, position):
    """(group, set, member) of an agent."""
    for (g, s), members in given.sets().items():
        if position in members:
            return g, s, members.index(position)
    raise AssertionError(position)


def step_by_step(given, params, position, first=0):
    """Values [T, B, n] of what an agent saw, and of what each step led to, one step at a time.

    By acting with its learner's network: the memory that a step led to is read before any reset.
    No gradient flows into the steps before `first`.
    """
    (g, s, n), rollout = member(given, position), given.rollout
    group, steps = given.team.lifted.groups[g], rollout.steps[g]
    learned = jax.tree.map(lambda x: x[s], params[g])
    memory = jax.tree.map(lambda x: x[s, n], rollout.memory[g])

    def seen(obs):
        if not group.identified:
            return obs[None]
        name = np.eye(group.shape[1], dtype="f")[n]
        return {
            "agent_id": np.broadcast_to(name, (1, *obs.shape[:-1], len(name))),
            "obs": obs[None],
        }

    q, final = [], []
    for t in range(len(rollout.reset)):
        active = rollout.active[t, position]
        own = learned if t >= first else jax.lax.stop_gradient(learned)
        obs = np.where(active[:, None], steps.obs[t, s, n], 0.0)
        out, memories = group.learner.q_unroll(
            own, seen(obs), memory, rollout.reset[None, t], active[None]
        )
        memory = jax.tree.map(lambda x: x[0], memories)
        never = np.zeros((1, len(active)), bool)
        after = seen(rollout.final_obs[g][t, s, n])
        q.append(out[0])
        final.append(group.learner.q_unroll(own, after, memory, never, ~never)[0][0])
    return jnp.stack(q), jnp.stack(final)


def reference_loss(given, members, params, target, which=slice(None)):
    """Half the mean squared error of the sum over the steps in which somebody acts."""
    total = 0.0
    for p in members:
        g, s, n = member(given, p)
        q, _ = step_by_step(given, params, p, which.start or 0)
        taken = jnp.take_along_axis(q, given.rollout.steps[g].action[:, s, n, :, None], -1)[..., 0]
        total += jnp.where(given.rollout.active[:, p], taken, 0.0)
    weight = given.rollout.active[:, members].any(1)[which]
    error = jnp.where(weight, total[which] - target, 0.0)
    return 0.5 * jnp.sum(error**2) / weight.sum()


def reference_following(given, members, judges, params):
    """[T, B]: the sum of what greedy actions of `judges` are worth where steps led to."""
    following, rollout = 0.0, given.rollout
    for p in members:
        g, s, n = member(given, p)
        mask = rollout.final_action_mask[g][:, s, n]
        judge, value = (np.asarray(step_by_step(given, x, p)[1]) for x in (judges, params))
        best = np.where(mask | ~mask.any(-1, keepdims=True), judge, -np.inf).argmax(-1)
        value = np.take_along_axis(value, best[..., None], -1)[..., 0]
        following += np.where(rollout.final_active[:, p], value, 0.0)
    return following


def reference_outcome(given, members):
    """Rewards, terminations and truncations [T, B]: pooled, at the ends of episodes."""
    rollout, over = given.rollout, given.rollout.episode_over
    active = rollout.active[:, members]
    paid = np.where(active, rollout.reward[:, members], 0.0).sum(1) / np.maximum(active.sum(1), 1)
    cut = over & (rollout.truncated[:, members] & active).any(1)
    return paid, over & ~cut, cut


def assert_stepped(given, members, params, state, grads):
    """Each network of the members by a step of Adam, clipped by itself."""
    own = given.team.hparams[members[0]]
    optimizer = optax.chain(
        optax.clip_by_global_norm(own.max_grad_norm),
        optax.adam(own.learning_rate, eps=own.adam_epsilon),
    )
    for (g, s), positions in given.sets().items():
        if not set(positions) <= set(members):
            continue
        mine, grad = (jax.tree.map(lambda x, s=s: x[s], tree[g]) for tree in (params, grads))
        updates, _ = optimizer.update(grad, optimizer.init(mine))
        after = jax.tree.map(lambda x, s=s: x[s], state[g].network.params)
        assert relative_difference(after, optax.apply_updates(mine, updates)) <= TOLERANCE
        assert relative_difference(after, mine) > 100 * TOLERANCE


@pytest.mark.parametrize("sharing", ["none", PAIR], ids=["apart", "shared"])
def test_an_update_equals_a_second_implementation(sharing):
    """Of agents in two groups, one of which dies; memories, resets and ends at random."""
    given, members = of(sharing=sharing), (0, 1, 2)
    (state, _), metrics = given.after(given.updater())
    params, own = tuple(x.network.params for x in given.state), given.team.hparams[0]
    paid, terminated, cut = reference_outcome(given, members)
    following = reference_following(given, members, params, params)
    target = returns.q_lambda(paid, following, terminated, cut, own.gamma, own.q_lambda)
    loss = partial(reference_loss, given, members, target=target)
    value, grads = jax.jit(jax.value_and_grad(lambda params: loss(params)))(params)
    np.testing.assert_allclose(metrics[0]["loss"][0], value, rtol=1e-4)
    assert_stepped(given, members, params, state, grads)


@pytest.mark.parametrize("burn_in", [0, 2])
def test_a_step_on_windows_equals_a_second_implementation(burn_in):
    """DQN: three steps of six, whose returns are of as many steps as are left; double Q."""
    windows = {"core": "gru", "core_size": 4, "sequence_length": 3, "burn_in": burn_in}
    given, members = (
        remembering(given_for(mixed_team(ENV, dqn, "vdn", **windows), LENGTH)),
        (0, 1, 2),
    )
    (state, _), metrics = given.after(given.updater())
    params, targets = (
        tuple(x.network.params for x in given.state),
        tuple(x.target_params for x in given.state),
    )
    gamma, num_envs = given.team.hparams[0].gamma, given.rollout.reset.shape[1]
    paid, terminated, cut = reference_outcome(given, members)
    following = reference_following(given, members, params, targets)
    target = np.zeros((3, num_envs))
    for t, b in np.ndindex(3, num_envs):
        discount = 1.0
        for k in range(burn_in + t, burn_in + t + LENGTH - burn_in - 2):
            target[t, b] += discount * paid[k, b]
            discount *= gamma
            if terminated[k, b] or cut[k, b]:
                break
        target[t, b] += 0.0 if terminated[k, b] else discount * following[k, b]
    which = slice(burn_in, burn_in + 3)
    loss = partial(reference_loss, given, members, target=target, which=which)
    value, grads = jax.jit(jax.value_and_grad(lambda params: loss(params)))(params)
    np.testing.assert_allclose(metrics[0]["loss"][0], value, rtol=1e-4)
    assert_stepped(given, members, params, state, grads)
    for before, after in zip(given.state[:1], state[:1], strict=True):
        moved = optax.incremental_update(after.network.params, before.target_params, 0.3)
        assert relative_difference(after.target_params, moved) <= TOLERANCE


@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_an_agent_alone_on_replay_learns_as_without_a_mixer(core):
    windows = {"core": core, "core_size": 4, "sequence_length": 3, "burn_in": 1}
    given = remembering(given_for(mixed_team(ENV, dqn, "vdn", **windows), LENGTH))
    (state, _), _ = given.after(given.updater())
    assert_alone(given, state, alone(given))


def test_flags_that_are_off_by_one_change_what_is_learned():
    given = of()
    update = given.updater()
    (right, _), _ = given.after(update)
    for by in (1, -1):
        (wrong, _), _ = given.after(update, reset=np.roll(given.rollout.reset, by, axis=0))
        assert relative_difference(wrong, right) > 1e-3


@pytest.mark.parametrize("burn_in", [0, 2])
def test_sequences_of_a_team_are_cut_at_the_same_steps(burn_in):
    """Where episodes begin with the second sequence, two halves teach what the whole does."""
    reset = np.array(of().rollout.reset)
    reset[LENGTH // 2] = True
    halves = {"sequence_length": LENGTH // 2, "burn_in": burn_in}
    found = [
        given.after(given.updater(), reset=reset)
        for given in (of("qmix", BLIND), of("qmix", BLIND, **halves))
    ]
    assert relative_difference(found[1], found[0]) <= TOLERANCE


@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_an_agent_alone_in_its_team_learns_as_without_a_mixer(core):
    """Sequences, minibatches and burn-in too."""
    sizes = {"sequence_length": 3, "burn_in": 1, "num_epochs": 2, "num_minibatches": 3}
    given = of(**(sizes | {"core": core}))
    (state, _), _ = given.after(given.updater())
    assert_alone(given, state, alone(given))


@pytest.mark.parametrize("mixer", [pytest.param("qmix", marks=pytest.mark.slow), "vdn"])
def test_vmapped_groups_equal_the_same_team_as_a_loop(mixer):
    options = MEMORY | {"sharing": PAIR, "num_minibatches": 2, "sequence_length": 3}
    vmapped, looped = (
        mixed_team(BLIND, pqn, mixer, **options, vectorise=vectorise) for vectorise in (True, False)
    )
    given = remembering(given_for(vmapped, LENGTH))
    loop = as_loop(given, looped)
    sets = sorted(given.sets(), key=lambda key: given.sets()[key])
    memory = tuple(
        jax.tree.map(lambda x, s=s: x[s : s + 1], given.rollout.memory[g]) for g, s in sets
    )
    loop = loop._replace(rollout=loop.rollout._replace(memory=memory))
    for found, expected in zip(repeated(given, (1, 3)), repeated(loop, (1, 3)), strict=True):
        assert relative_difference(found, expected) <= TOLERANCE


def test_what_inactive_agents_saw_changes_nobody():
    given = of()
    update, rollout = given.updater(), given.rollout
    steps = []
    for group, own in zip(given.team.lifted.groups, rollout.steps, strict=True):
        live = rollout.active[:, list(group.positions)].reshape(own.obs.shape[:4])
        obs = np.array(own.obs)
        obs[~live] = np.nan
        steps.append(own._replace(obs=obs))
    clean, dirty = given.after(update), given.after(update, steps=tuple(steps))
    assert all_finite(dirty)
    assert_identical(dirty, clean)


def test_teams_that_cut_rollouts_alike_learn_together():
    """And others apart: with memory and without it, in epochs of their own number."""
    pair, rest = {"pair": ["ann", "cid"], "rest": ["big", "solo"]}, {"core": "none"}
    overrides = {agent: rest | {"num_epochs": 3} for agent in ("big", "solo")}
    options = MEMORY | {"reward_teams": pair, "num_minibatches": 2}
    team = mixed_team(ENV, pqn, "vdn", **options, overrides=overrides)
    parts = mixing.alike(team.spec, team.lifted.groups, on_replay=False)
    assert [x.teams for x in parts] == [((0, 2),), ((1, 3),)]
    given = remembering(given_for(team, LENGTH))
    (state, _), metrics = given.after(given.updater())
    assert all_finite(state) and all(metrics)
    before, after = (agent_states(team, x) for x in (given.state, state))
    # the second pair learns what it does beside a team without memory, of another size, in one part
    overrides |= {agent: overrides["big"] | {"hidden_sizes": (4,)} for agent in ("ann", "cid")}
    plain = given_for(mixed_team(ENV, pqn, "vdn", **options, overrides=overrides), LENGTH)
    assert len(mixing.alike(plain.team.spec, plain.team.lifted.groups, on_replay=False)) == 1
    rollout = given.rollout._replace(memory=plain.rollout.memory)
    plain = plain._replace(state=(plain.state[0], *given.state[1:]), rollout=rollout)
    beside = agent_states(team, plain.after(plain.updater())[0][0])
    for agent in ("big", "solo"):
        assert relative_difference(beside[agent], after[agent]) <= TOLERANCE
    for agent in team.agents:
        assert relative_difference(before[agent].network, after[agent].network) > 1e-3


BAD = {
    "memory and none": (
        {"overrides": {"big": {"core": "none"}}},
        r"have memory \(ann: gru, big: none, cid: gru\).*give all of them a core, or none",
    ),
    "two burn-ins": (
        {"sequence_length": 3, "overrides": {"ann": {"burn_in": 2}}},
        "burn_in differs among ann, big, cid",
    ),
    "two lengths": (
        {"overrides": {"big": {"sequence_length": 2}}},
        "sequence_length differs among ann, big, cid",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_mixed_is_refused(name):
    options, message = BAD[name]
    with pytest.raises(UsageError, match=message):
        mixed_team(ENV, pqn, "vdn", **(MEMORY | options))


@pytest.mark.parametrize("algorithm", [pqn, dqn])
def test_a_team_trains_with_what_it_remembers(algorithm):
    """Through the real train step; kinds of memory may differ within a team."""
    options = {"core": "gru", "core_size": 4, "sequence_length": 4, "num_epochs": 1}
    options |= {"overrides": {"big": {"core": "lstm"}}}
    if algorithm is dqn:
        del options["num_epochs"]
    team = mixed_team(ENV, algorithm, "qmix", **options)
    state, metrics = trained(team, compiled(team, max_updates=2), 2)
    assert all_finite(state.team) and all_finite(metrics.learner)
    assert all(np.any(x != 0) for x in jax.tree.leaves(state.carry.memory))


LEARNERS = {
    "pqn": {"num_epochs": 4, "num_minibatches": 1},
    "dqn": {
        "tau": 0.05,
        "replay": {"batch_size": 64, "learning_starts": 128, "updates_per_rollout": 8},
    },
}


@pytest.mark.parametrize(
    ("learner", "core"),
    [("pqn", "gru"), ("dqn", "gru"), pytest.param("pqn", "none", marks=pytest.mark.slow)],
)
def test_a_team_that_is_paid_together_remembers(learner, core):
    """Two agents, each with a cue of its own; without memory nobody's mean return is above 0."""
    env = marl.make("toy/probe_memory", num_agents=2)
    options = {"hidden_sizes": (16,), "learning_rate": 0.01, "gamma": 0.9}
    options |= {"epsilon_end": 0.0, "exploration_fraction": 0.5, "core": core, "core_size": 16}
    if core != "none":
        options |= {"sequence_length": 4, "burn_in": 2}
    team = marl.team(env, learner, mixer="vdn", reward_teams="all", **(options | LEARNERS[learner]))
    sizes = {"num_envs": 16, "rollout_length": 8, "eval_episodes": 64, "progress": False}
    run = marl.train(env, team, 200 * 16 * 8, **sizes)
    found = run.evaluations[-1]["greedy"]["returns"]["agent_0"]["mean"]
    assert found >= 0.95 if core == "gru" else abs(found) < 0.3
