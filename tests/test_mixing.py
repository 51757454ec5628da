"""Value decomposition: against a second implementation, across groups, and what it can learn.

Axes: T steps, A agents, B environments or windows, S sharing sets of N agents.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
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
)

import marl
from marl import decomposition, learning, mixing
from marl.agents import dqn, networks, ppo, pqn
from marl.envs.errors import UsageError
from marl.envs.interface import AutoReset, TimeStep
from marl.envs.spaces import Box, Discrete
from marl.experience import GroupSteps, TeamRollout
from marl.training import seed_keys

TOLERANCE = 1e-5


class Day(NamedTuple):
    """State of a `Workshop`."""

    step: jax.Array  # [] int32
    draw: Any  # by agent, what it sees


@dataclasses.dataclass(frozen=True)
class Workshop:
    """Four steps of four agents of two kinds, paid by the action and what they see.

    "big" sees three numbers and has three actions, the others two. "cid" dies in the second step;
    at the end "ann" is truncated and the others terminate. Actions whose number was drawn above 1
    are illegal. With `poison`, what must not be read of "cid" is NaN, and it may do nothing.
    """

    shows_state: bool = True
    poison: bool = False

    agents = ("ann", "big", "cid", "solo")
    sizes = (2, 3, 2, 2)

    @property
    def observation_spaces(self):
        return {agent: Box((n,)) for agent, n in zip(self.agents, self.sizes, strict=True)}

    @property
    def action_spaces(self):
        return {agent: Discrete(n) for agent, n in zip(self.agents, self.sizes, strict=True)}

    def reset(self, key):
        state = self._drawn(key, jnp.int32(0))
        return state.draw, state

    def step(self, key, state, action):
        reached = self._drawn(key, state.step + 1)
        over, dead = reached.step >= 4, reached.step >= 2
        out = dict.fromkeys(self.agents, over)
        obs = dict(reached.draw)
        reward = {agent: state.draw[agent][0] * action[agent] for agent in self.agents}
        if self.poison:
            obs["cid"] = jnp.where(dead, jnp.nan, obs["cid"])
            reward["cid"] = jnp.where(state.step >= 2, jnp.nan, reward["cid"])
        timestep = TimeStep(
            obs=obs,
            reward=reward,
            terminated=out | {"ann": over & False, "cid": reached.step == 2},
            truncated=dict.fromkeys(self.agents, over & False) | {"ann": over},
            active={agent: ~x for agent, x in (out | {"cid": dead}).items()},
            episode_over=over,
            final_obs=obs,
            final_extras=(),
            info=(),
        )
        return timestep, reached

    def action_mask(self, state):
        legal = {agent: x < 1 for agent, x in state.draw.items()}
        if self.poison:
            legal["cid"] = legal["cid"] & (state.step < 2)
        return legal

    def global_state(self, state):
        return jnp.stack([state.draw["ann"][0], state.draw["big"][1]]) if self.shows_state else None

    def _drawn(self, key, step):
        keys = jax.random.split(key, len(self.agents))
        drawn = zip(self.agents, self.sizes, keys, strict=True)
        return Day(step, {agent: jax.random.normal(key, (n,)) for agent, n, key in drawn})


ENV, BLIND = AutoReset(Workshop()), AutoReset(Workshop(shows_state=False))
CREW = {"crew": ["ann", "big", "cid"]}  # "solo" stands alone
PAIR = {"pair": ["ann", "cid"]}
HPARAMS = SMOOTH | {"gamma": 0.9, "max_grad_norm": 0.5}
REPLAY = {"capacity": 256, "batch_size": 8, "learning_starts": 16, "updates_per_rollout": 2}
OPTIONS = {
    dqn: {"tau": 0.3, "replay": REPLAY},
    pqn: {"q_lambda": 0.7, "num_epochs": 2, "num_minibatches": 1},
}


def mixed_team(env, algorithm, mixer, **options):
    given = {"hidden_sizes": (8,), "reward_teams": CREW, "mixer": mixer} | HPARAMS
    return marl.team(env, algorithm, **(given | OPTIONS[algorithm] | options))


class Given(NamedTuple):
    """What an update starts from."""

    team: Any
    state: Any
    mixers: Any
    rollout: Any

    def updater(self):
        """(state, mixers, rollout, hparams) -> ((state, mixers), metrics), compiled."""
        spec, built = self.team.spec, self.team.lifted.groups
        if spec.replay is not None:
            return jax.jit(partial(decomposition.replay_step, spec, built))
        return jax.jit(partial(decomposition.update, spec, built, jax.random.key(7)))

    def after(self, update, **changes):
        """((state, mixers), metrics) after `update` on the rollout with other fields."""
        rollout = self.rollout._replace(**changes)
        return update(self.state, self.mixers, rollout, self.team.group_hparams())

    def sets(self):
        """By (group, sharing set), positions."""
        groups = enumerate(self.team.lifted.groups)
        return {(g, s): members for g, group in groups for s, members in enumerate(group.sets)}


def given_for(team, length=3, num_envs=6):
    """Drawn networks, and a drawn rollout in which anything may be true of anybody.

    In the first environment nobody acts in the first step; "solo" is always away in the next.
    """
    spec, built, generator = team.spec, team.lifted.groups, np.random.default_rng(0)
    batch = (length, len(spec.agents), num_envs)
    key, hparams = jax.random.key(0), team.group_hparams()

    def normal(*shape):
        return generator.normal(size=shape).astype("f")

    def flags(share):
        return generator.random(batch) < share

    def network(state):  # parameters of both signs; of targets others
        params, target = (
            jax.tree.map(lambda x: 0.5 * normal(*x.shape), x)
            for x in (state.network.params, state.target_params)
        )
        rest = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)
        return rest._replace(network=rest.network._replace(params=params), target_params=target)

    steps, finals, masks = [], [], []
    for group in built:
        n = Workshop.sizes[group.positions[0]]
        shape = (length, *group.shape, num_envs)
        action = generator.integers(0, n, shape, "i")
        steps.append(GroupSteps(normal(*shape, n), action, None, ()))
        finals.append(normal(*shape, n))
        masks.append(generator.random((*shape, n)) < 0.7)
    reads = spec.state is not None
    active = flags(0.6)
    active[0, :, 0] = False
    final_active = flags(0.7)
    final_active[:, 3] = False
    rollout = TeamRollout(
        steps=tuple(steps),
        final_obs=tuple(finals),
        final_action_mask=tuple(masks),
        memory=team.learner.initial_memory(num_envs),
        reset=np.zeros((length, num_envs), bool),
        reward=normal(*batch),
        terminated=flags(0.3),
        truncated=flags(0.2),
        active=active,
        final_active=final_active,
        episode_over=flags(0.4)[:, 0],
        global_state=normal(length, num_envs, 2) if reads else (),
        final_global_state=normal(length, num_envs, 2) if reads else (),
        env_steps=np.float32(0.0),
    )
    state = jax.eval_shape(team.learner.init, key, hparams)
    mixers = jax.eval_shape(partial(mixing.init, spec, built), key, hparams)
    mixers = tuple(x if x == () else network(x) for x in mixers)
    return Given(team, tuple(map(network, state)), mixers, rollout)


class Sight(NamedTuple):
    """What one agent's network reads, and what the agent did and may do; [T, B, ...]."""

    obs: Any
    final_obs: Any
    action: Any
    final_mask: Any
    raw: Any  # observations without an id
    final_raw: Any


def sights(given):
    """By position."""
    found, rollout = {}, given.rollout
    for (g, s), members in given.sets().items():
        steps, final, mask = rollout.steps[g], rollout.final_obs[g], rollout.final_action_mask[g]
        for n, position in enumerate(members):
            raw, final_raw = (np.asarray(x[:, s, n]) for x in (steps.obs, final))
            name = np.broadcast_to(
                np.eye(len(members), dtype="f")[n], (*raw.shape[:2], len(members))
            )
            obs, final_obs = (
                np.concatenate([name, x], -1) if len(members) > 1 else x for x in (raw, final_raw)
            )
            action, legal = np.asarray(steps.action[:, s, n]), np.asarray(mask[:, s, n])
            found[position] = Sight(obs, final_obs, action, legal, raw, final_raw)
    return found


def q_of(params, x):
    """One hidden layer, with layer norm if there is any."""
    first, head = params["linear"], params["linear_1"]
    x = x @ first["w"].T + first["b"]
    if "layer_norm" in params:
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
        x = x * params["layer_norm"]["scale"].ravel() + params["layer_norm"]["offset"].ravel()
    return jnp.maximum(x, 0.0) @ head["w"].T + head["b"]


def mix(params, values, state):
    """QMIX of values [..., n] and a state [..., D], or VDN where there are no parameters."""
    if params == ():
        return values.sum(-1)

    def linear(name, x):
        return x @ params[name]["w"] + params[name]["b"]

    def hyper(mlp, name):
        return linear(name, jnp.maximum(linear(f"{mlp}/~/linear_0", state), 0.0))

    weights = jnp.abs(hyper("mlp", "linear"))
    weights = weights.reshape(*values.shape, -1)
    hidden = jnp.einsum("...n,...nw->...w", values, weights) + linear("linear_1", state)
    hidden = jnp.where(hidden > 0, hidden, jnp.exp(jnp.minimum(hidden, 0.0)) - 1.0)
    final = jnp.abs(hyper("mlp_1", "linear_2"))
    return (hidden * final).sum(-1) + hyper("mlp_2", "linear_3")[..., 0]


def reference_next(given, members, double):
    """[T, B]: what a team's greedy actions are worth where each step led to."""
    seen, rollout, values = sights(given), given.rollout, []
    owner = {p: key for key, own in given.sets().items() for p in own}
    for p in members:
        g, s = owner[p]
        state, one = given.state[g], seen[p]
        online, target = (
            np.asarray(q_of(jax.tree.map(lambda x, s=s: x[s], params), one.final_obs))
            for params in (state.network.params, state.target_params or state.network.params)
        )
        chooser = np.where(one.final_mask | ~one.final_mask.any(-1, keepdims=True), 0, -np.inf)
        best = (chooser + (online if double else target)).argmax(-1)
        value = np.take_along_axis(target, best[..., None], -1)[..., 0]
        values.append(np.where(rollout.final_active[:, p], value, 0.0))
    mixer = given.mixers[0]
    params = () if mixer == () else mixer.target_params or mixer.network.params
    return np.asarray(mix(params, jnp.stack(values, -1), mixer_state(given, members, final=True)))


def mixer_state(given, members, final):
    if given.team.spec.state is not None:
        return given.rollout.final_global_state if final else given.rollout.global_state
    return np.concatenate(
        [sights(given)[p].final_raw if final else sights(given)[p].raw for p in members], -1
    )


def reference_targets(given, members, following):
    """[T, B] of PQN, or [1, B] of DQN, step by step."""
    rollout = jax.tree.map(np.asarray, given.rollout._replace(steps=(), final_obs=()))
    own = given.team.hparams[members[0]]
    reward = np.zeros(following.shape)
    cut = np.zeros(following.shape, bool)
    for t, b in np.ndindex(following.shape):
        paid = [rollout.reward[t, p, b] for p in members if rollout.active[t, p, b]]
        reward[t, b] = np.mean(paid) if paid else 0.0
        cut[t, b] = any(rollout.truncated[t, p, b] and rollout.active[t, p, b] for p in members)
    length, found = len(following), np.zeros(following.shape)
    decay = 1.0 if given.team.spec.replay is not None else own.q_lambda
    for b in range(following.shape[1]):
        for t in reversed(range(length)):
            over = rollout.episode_over[t, b]
            ahead = following[t, b]
            if not over and t + 1 < length:
                ahead = decay * found[t + 1, b] + (1 - decay) * ahead
            if over and not cut[t, b]:
                ahead = 0.0
            found[t, b] = reward[t, b] + own.gamma * ahead
    return found[:1] if given.team.spec.replay is not None else found


def reference_update(given, members, double, steps):
    """Parameters by sharing set, and of the mixer, after `steps` of Adam on all samples."""
    seen, own = sights(given), given.team.hparams[members[0]]
    target = reference_targets(given, members, reference_next(given, members, double))
    length = len(target)
    active = np.asarray(given.rollout.active)[:length]
    weight = active[:, members].any(1)
    assert not weight.all() and not active[:, members].all()
    state = mixer_state(given, members, final=False)[:length]
    keys = [key for key, positions in given.sets().items() if set(positions) <= set(members)]
    params = [jax.tree.map(lambda x, s=s: x[s], given.state[g].network.params) for g, s in keys]
    params.append(given.mixers[0].network.params if given.mixers[0] != () else ())

    def loss(params):
        values = {}
        for key, own in zip(keys, params[:-1], strict=True):
            for p in given.sets()[key]:
                q = q_of(own, seen[p].obs[:length])
                taken = jnp.take_along_axis(q, seen[p].action[:length, :, None], -1)[..., 0]
                values[p] = jnp.where(active[:, p], taken, 0.0)
        total = mix(params[-1], jnp.stack([values[p] for p in members], -1), state)
        return 0.5 * jnp.sum(jnp.where(weight, total - target, 0.0) ** 2) / weight.sum()

    optimizer = optax.chain(
        optax.clip_by_global_norm(own.max_grad_norm),
        optax.adam(own.learning_rate, eps=own.adam_epsilon),
    )

    @jax.jit
    def step(params, optimizers):
        grads, found = jax.grad(loss)(params), []
        for one, grad, state in zip(params, grads, optimizers, strict=True):
            updates, state = optimizer.update(grad, state)
            found.append((optax.apply_updates(one, updates), state))
        return [list(x) for x in zip(*found, strict=True)]

    optimizers = [optimizer.init(x) for x in params]
    for _ in range(steps):
        params, optimizers = step(params, optimizers)
    return dict(zip([*keys, "mixer"], params, strict=True))


GOLDEN = {
    "dqn-vdn": (ENV, dqn, "vdn", {}),
    "dqn-qmix": (ENV, dqn, "qmix", {"double": False}),
    "dqn-qmix-of-observations": (BLIND, dqn, "qmix", {}),
    "dqn-vdn-shared": (ENV, dqn, "vdn", {"sharing": PAIR}),
    "pqn-vdn": (ENV, pqn, "vdn", {}),
    "pqn-qmix": (ENV, pqn, "qmix", {}),
    "pqn-qmix-shared": (BLIND, pqn, "qmix", {"sharing": PAIR}),
}


@pytest.fixture(scope="module", params=GOLDEN)
def golden(request):
    """A name, `Given`, its compiled update, and what that made of it."""
    env, algorithm, mixer, options = GOLDEN[request.param]
    given = given_for(mixed_team(env, algorithm, mixer, **options))
    update = given.updater()
    return request.param, given, update, given.after(update)


def test_an_update_equals_a_second_implementation(golden):
    """Of three agents of two kinds, in which each network, and the mixer, is clipped by itself."""
    name, given, _, ((state, mixers), _) = golden
    algorithm, options = GOLDEN[name][1], GOLDEN[name][3]
    double = algorithm is dqn and options.get("double", True)
    steps = 1 if algorithm is dqn else 2
    expected = reference_update(given, (0, 1, 2), double, steps)
    for key, params in expected.items():
        before, after = (
            mixer if key == "mixer" else jax.tree.map(lambda x, s=key[1]: x[s], groups[key[0]])
            for groups, mixer in ((given.state, given.mixers[0]), (state, mixers[0]))
        )
        if params == ():
            assert before == after == ()
            continue
        assert relative_difference(after.network.params, params) <= TOLERANCE
        assert relative_difference(before.network.params, params) > 100 * TOLERANCE
        if algorithm is dqn:
            target = optax.incremental_update(params, before.target_params, 0.3)
            assert relative_difference(after.target_params, target) <= TOLERANCE
        else:
            assert after.target_params == ()


def test_what_inactive_agents_did_changes_nobody(golden):
    """Actions, rewards, flags and masks; and what they saw, which their own network never learns.

    Without a global state a mixer reads members' observations, of which those of who is out are
    zeros from the start: see the test with poison.
    """
    name, given, update, clean = golden
    rollout = given.rollout
    # "solo" is not mixed: as without a mixer, it bootstraps from wherever it was led to
    active, final = rollout.active, rollout.final_active | (np.arange(4) == 3)[:, None]

    def of_groups(trees, live, value):
        """Other values [T, S, N, B, ...] where `live` [T, A, B] is false."""

        def leaf(x, index):
            group = given.team.lifted.groups[index]
            own = live[:, list(group.positions)].reshape(*x.shape[:4])
            x = np.array(x)
            x[~own] = value
            return x

        return tuple(
            jax.tree.map(partial(leaf, index=index), tree) for index, tree in enumerate(trees)
        )

    obs, final_obs = [steps.obs for steps in rollout.steps], rollout.final_obs
    if "of-observations" not in name and GOLDEN[name][0] is ENV:
        obs, final_obs = of_groups(obs, active, 99.0), of_groups(final_obs, final, 99.0)
    action = of_groups([steps.action for steps in rollout.steps], active, 7)
    dirty = given.after(
        update,
        steps=tuple(
            steps._replace(obs=seen, action=done)
            for steps, seen, done in zip(rollout.steps, obs, action, strict=True)
        ),
        final_obs=final_obs,
        final_action_mask=of_groups(rollout.final_action_mask, final, False),
        reward=jnp.where(active, rollout.reward, jnp.nan),
        terminated=rollout.terminated | ~active,
        truncated=rollout.truncated | ~active,
    )
    assert all_finite(dirty)
    assert_identical(dirty, clean)
    other = rollout.steps[0]._replace(action=1 - rollout.steps[0].action)
    assert not identical(given.after(update, steps=(other, *rollout.steps[1:])), clean)


def test_steps_without_any_member_teach_nothing(golden):
    _, given, update, _ = golden
    quiet = given.rollout.active & (np.arange(4) == 3)[:, None]
    (state, mixers), metrics = given.after(update, active=quiet)
    before, after = (agent_states(given.team, x) for x in (given.state, state))
    for agent in ("ann", "big", "cid"):
        assert_identical(after[agent].network.params, before[agent].network.params)
    assert not identical(after["solo"].network.params, before["solo"].network.params)
    if mixers[0] != ():
        assert_identical(mixers[0].network.params, given.mixers[0].network.params)
    assert metrics[1]["loss"] == 0


def alone(given, key=7):
    """States after an update of the same team without a mixer."""
    team = dataclasses.replace(given.team.spec, mixer="none")
    function = learning.update if team.replay is None else learning.replay_step
    update = jax.jit(partial(function, team, given.team.lifted.groups, jax.random.key(key)))
    return update(given.state, given.rollout, given.team.group_hparams())[0]


def assert_alone(given, state, expected):
    found, wanted, before = (
        agent_states(given.team, x)["solo"] for x in (state, expected, given.state)
    )
    assert relative_difference(found, wanted) <= TOLERANCE
    assert relative_difference(before.network.params, wanted.network.params) > 100 * TOLERANCE


def test_an_agent_alone_in_its_team_learns_as_without_a_mixer(golden):
    _, given, _, ((state, _), _) = golden
    assert_alone(given, state, alone(given))


def test_an_agent_alone_in_its_team_sees_minibatches_as_without_a_mixer():
    given = given_for(mixed_team(ENV, pqn, "vdn", num_minibatches=3))
    (state, _), _ = given.after(given.updater())
    assert_alone(given, state, alone(given))


# The mixer


@pytest.fixture(scope="module")
def mixer():
    """Gradients by the values [M, 3], for the seed of parameters, states [M, 5] and values."""
    network = networks.make_mixer(3)

    @jax.jit
    def slopes(seed):
        keys = jax.random.split(jax.random.key(seed), 4)
        values = 3.0 * jax.random.normal(keys[0], (16, 3))
        state = 2.0 * jax.random.normal(keys[1], (16, 5))
        params = network.init(keys[2], values, state)
        leaves, structure = jax.tree.flatten(params)
        noise = jax.random.split(keys[3], len(leaves))
        params = structure.unflatten(
            [x + jax.random.normal(key, x.shape) for key, x in zip(noise, leaves, strict=True)]
        )
        return jax.grad(lambda x: jnp.sum(network.apply(params, x, state)))(values)

    return network, slopes


@settings(max_examples=50)
@given(seed=st.integers(0, 2**31 - 1))
def test_a_mixture_never_falls_when_a_value_rises(mixer, seed):
    slopes = np.asarray(mixer[1](seed))
    assert np.all(slopes >= 0) and np.any(slopes > 0)


def test_a_mixer_starts_near_the_sum(mixer):
    network, _ = mixer
    generator = np.random.default_rng(0)
    values, state = (generator.normal(size=(64, n)).astype("f") for n in (3, 5))
    params = network.init(jax.random.key(0), values, state)
    mixed = network.apply(params, 0.1 * values, state)
    np.testing.assert_allclose(mixed, 0.1 * values.sum(-1), atol=0.03)


# Groups


def as_loop(given, looped):
    """The same of a team without vmapped groups: each of its groups is one sharing set."""
    state, rollout, sets = given.state, given.rollout, list(given.sets())

    def of(trees, axis):
        return tuple(jax.tree.map(lambda x, s=s: np.take(x, [s], axis), trees[g]) for g, s in sets)

    members = [positions for group in looped.lifted.groups for positions in group.sets]
    assert members == [given.sets()[key] for key in sorted(sets, key=lambda k: given.sets()[k])]
    sets.sort(key=lambda key: given.sets()[key])
    rollout = rollout._replace(
        steps=of(rollout.steps, 1),
        final_obs=of(rollout.final_obs, 1),
        final_action_mask=of(rollout.final_action_mask, 1),
        memory=looped.learner.initial_memory(rollout.reset.shape[1]),
    )
    return Given(looped, of(state, 0), given.mixers, rollout)


def repeated(given, steps=(1, 5)):
    """By agent, states after so many updates; and mixers."""
    update, learned, found = given.updater(), (given.state, given.mixers), []
    for number in range(1, 1 + steps[-1]):
        learned, _ = update(*learned, given.rollout, given.team.group_hparams())
        if number in steps:
            found.append((agent_states(given.team, learned[0]), learned[1]))
    return found


@pytest.mark.parametrize(
    ("algorithm", "mixer", "options"),
    [
        (dqn, "qmix", {}),
        (pqn, "vdn", {"sharing": PAIR, "num_minibatches": 3}),
        pytest.param(dqn, "vdn", {"sharing": PAIR}, marks=pytest.mark.slow),
        pytest.param(pqn, "qmix", {"num_minibatches": 3}, marks=pytest.mark.slow),
    ],
)
def test_vmapped_groups_equal_the_same_team_as_a_loop(algorithm, mixer, options):
    vmapped, looped = (
        mixed_team(ENV, algorithm, mixer, **options, vectorise=vectorise)
        for vectorise in (True, False)
    )
    given = given_for(vmapped)
    start = agent_states(vmapped, given.state), given.mixers
    for found, expected in zip(repeated(given), repeated(as_loop(given, looped)), strict=True):
        assert relative_difference(found, expected) <= TOLERANCE
        assert relative_difference(found, start) > 100 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "mixer"), [(dqn, "vdn"), (pqn, "qmix")])
def test_a_team_trains_the_same_vmapped_and_as_a_loop(algorithm, mixer):
    """From the same bits, through the real train step; in these episodes an agent dies."""
    found = []
    for vectorise in (True, False):
        team = mixed_team(ENV, algorithm, mixer, vectorise=vectorise)
        trainer = compiled(team)
        state = first_state(team, trainer)
        start = jax.tree.map(jnp.copy, (agent_states(team, state.team), state.mixers))
        state, _ = trainer.chunk(state, 5)
        found.append((start, (agent_states(team, state.team), state.mixers)))
    (start, after), (other_start, other) = found
    assert_identical(start, other_start)
    assert relative_difference(after, other) <= TOLERANCE
    assert relative_difference(after, start) > 100 * TOLERANCE


BOTH = {  # a team on replay, and one on rollouts
    "reward_teams": {"pupils": ["ann", "cid"], "others": ["big", "solo"]},
    "overrides": {
        agent: {"learner": pqn, "hidden_sizes": (8,), "num_minibatches": 2}
        for agent in ("big", "solo")
    },
}


def test_teams_on_replay_and_on_rollouts_go_side_by_side():
    given = given_for(mixed_team(ENV, dqn, "qmix", **BOTH))
    pupils, others = given.mixers
    assert pupils.target_params != () and others.target_params == ()
    spec, built, hparams = given.team.spec, given.team.lifted.groups, given.team.group_hparams()
    updates = {
        "pupils": partial(decomposition.replay_step, spec, built),
        "others": partial(decomposition.update, spec, built, jax.random.key(0)),
    }
    for name, update in updates.items():
        (state, mixers), _ = jax.jit(update)(given.state, given.mixers, given.rollout, hparams)
        before, after = (agent_states(given.team, x) for x in (given.state, state))
        changed = {agent for agent in before if not identical(before[agent], after[agent])}
        assert changed == set(BOTH["reward_teams"][name])
        same = [identical(x, y) for x, y in zip(given.mixers, mixers, strict=True)]
        assert same == [name != "pupils", name != "others"]


# Through training


def test_observations_of_who_is_out_are_never_read():
    """NaN or not, of an agent that dies, whose observations a mixer reads while it lives."""
    found = []
    for poison in (False, True):
        team = mixed_team(AutoReset(Workshop(shows_state=False, poison=poison)), dqn, "qmix")
        state, rollout = play(team, num_envs=4, length=4)
        if not found:  # the environment is no part of an update
            given = given_for(team, length=4, num_envs=4)
            update = given.updater()
        assert not np.all(rollout.active[:, 2]) and np.all(rollout.active[:, 0])
        given = given._replace(rollout=rollout, state=given.state)
        found.append((state, given.after(update, steps=rollout.steps)))
    assert all_finite(found)
    assert_identical(*found)


def test_schedules_and_target_networks_of_a_mixer_are_its_agents():
    team = mixed_team(
        ENV,
        dqn,
        "qmix",
        target_update_interval=2,
        learning_rate_schedule="linear",
        schedule_steps=100.0,
    )
    given = given_for(team)
    update = given.updater()
    (state, (mixer, _)), _ = given.after(update)
    before = given.mixers[0]
    assert_identical(mixer.target_params, before.target_params)
    assert_identical(state[0].target_params, given.state[0].target_params)
    (_, (second, _)), _ = update(state, (mixer, ()), given.rollout, team.group_hparams())
    moved = optax.incremental_update(second.network.params, before.target_params, 0.3)
    assert relative_difference(second.target_params, moved) <= TOLERANCE

    def step(env_steps):
        (_, (after, _)), _ = given.after(update, env_steps=np.float32(env_steps))
        difference = jax.tree.map(jnp.subtract, after.network.params, before.network.params)
        return ravel_pytree(difference)[0]

    assert np.all(step(100.0) == 0) and np.any(step(0.0) != 0)
    np.testing.assert_allclose(step(0.0), 2 * step(50.0), atol=1e-6)


@pytest.mark.slow
def test_resuming_goes_on_with_the_mixers(tmp_path):
    """Of two teams, on replay and on rollouts; bit by bit."""
    options = BOTH | {"schedule_steps": 1000.0}
    options["overrides"] = {
        agent: changes | {"schedule_steps": 1000.0} for agent, changes in BOTH["overrides"].items()
    }
    team = mixed_team(ENV, dqn, "qmix", **options)
    sizes = {"num_envs": 4, "rollout_length": 8, "eval_episodes": 2, "progress": False}
    train = partial(marl.train, ENV, team, log_interval=2, **sizes)
    first = train(4 * 32, out=tmp_path / "run")
    assert [type(x).__name__ for x in first.state.mixers] == ["MixerState", "MixerState"]
    mixers = jax.tree.map(np.asarray, first.state.mixers)
    resumed = train(8 * 32, out=tmp_path / "run", resume=tmp_path / "run")
    straight = train(8 * 32)
    for before, after in zip(mixers, straight.state.mixers, strict=True):
        assert not identical(before, after)
    assert_identical(resumed.state, straight.state)


def test_mixers_are_part_of_a_runs_state():
    for mixer, kinds in (("vdn", ["tuple"] * 2), ("qmix", ["MixerState", "tuple"])):
        team = mixed_team(ENV, dqn, mixer)
        state = jax.eval_shape(compiled(team).init_function, seed_keys(0, 1), team.group_hparams())
        assert [type(x).__name__ for x in state.mixers] == kinds
        assert "rewards: crew pools (mean) ann, big, cid" in team.describe()


# What can be learned

ADDITIVE, PAPER = ((0.0, 4.0), (4.0, 8.0)), ((0.0, 1.0), (1.0, 8.0))
UNIFORM = {"epsilon_end": 1.0, "gamma": 0.99, "learning_rate": 1e-3, "hidden_sizes": (32,)}
SIZES = {"num_seeds": 3, "num_envs": 16, "log_interval": 100, "progress": False}
LEARNERS = {
    dqn: {
        "tau": 0.05,
        "replay": {
            "capacity": 4096,
            "batch_size": 64,
            "updates_per_rollout": 4,
            "learning_starts": 256,
        },
    },
    pqn: {"num_epochs": 2, "num_minibatches": 2, "q_lambda": 0.0},
}
LENGTHS = {dqn: 2, pqn: 4}


@pytest.mark.parametrize(
    ("algorithm", "mixer", "payoff", "best"),
    [
        (dqn, "none", ADDITIVE, 7.0),
        (dqn, "vdn", ADDITIVE, 8.0),
        (dqn, "qmix", PAPER, 8.0),
        pytest.param(dqn, "vdn", PAPER, 7.0, marks=pytest.mark.slow),
        pytest.param(dqn, "qmix", ADDITIVE, 8.0, marks=pytest.mark.slow),
        pytest.param(pqn, "none", ADDITIVE, 7.0, marks=pytest.mark.slow),
        pytest.param(pqn, "vdn", ADDITIVE, 8.0, marks=pytest.mark.slow),
        pytest.param(pqn, "vdn", PAPER, 7.0, marks=pytest.mark.slow),
        pytest.param(pqn, "qmix", ADDITIVE, 8.0, marks=pytest.mark.slow),
        pytest.param(pqn, "qmix", PAPER, 8.0, marks=pytest.mark.slow),
    ],
)
def test_the_two_step_game_ends_where_the_theory_says(algorithm, mixer, payoff, best):
    """While everybody explores, independent values are means over the other's actions.

    In the second matrix the risky action is then worth 6 (of ADDITIVE) to each, less than 7 for
    sure. A sum is exact there; of PAPER its least squares say 6.5. What is monotonic says 8.
    """
    env = marl.make("toy/two_step", payoff=payoff)
    options = UNIFORM | LEARNERS[algorithm]
    team = marl.team(env, algorithm, mixer=mixer, reward_teams="all", **options)
    run = marl.train(env, team, 20_000, rollout_length=LENGTHS[algorithm], **SIZES)
    greedy = run.evaluations[-1]["greedy"]
    assert len(greedy) == 3
    for seed in greedy:
        assert seed["returns"]["first"]["mean"] == seed["returns"]["second"]["mean"] == best


# Errors

BAD = {
    "unknown": ({"mixer": "qmx"}, "qmix"),
    "nobody in a team": ({"reward_teams": "none"}, "give reward_teams, as in reward_teams = 'all'"),
    "ppo in a mixed team": (
        {"overrides": {"big": {"learner": ppo}}},
        "reward team crew; big have none",
    ),
    "two discounts": (
        {"overrides": {"cid": {"gamma": 0.5}}},
        "gamma differs among ann, big, cid",
    ),
    "two rates of targets": (
        {"overrides": {"big": {"tau": 0.5}}},
        "tau differs among ann, big, cid",
    ),
    "one set in two teams": (
        {"sharing": {"both": ["ann", "solo"]}},
        "must be in one reward team under a mixer; ann, solo are not",
    ),
    "deaths that end returns": ({"death": "terminal"}, "mixer needs death = 'continue'"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_mixed_is_refused(name):
    options, message = BAD[name]
    with pytest.raises(UsageError, match=message):
        mixed_team(ENV, dqn, **({"mixer": "vdn"} | options))


def test_traces_of_a_team_must_be_one():
    with pytest.raises(UsageError, match="q_lambda differs among ann, big, cid"):
        mixed_team(ENV, pqn, "vdn", overrides={"ann": {"q_lambda": 0.1}})


def test_learners_without_values_may_stand_beside_a_mixed_team():
    team = mixed_team(ENV, dqn, "qmix", overrides={"solo": {"learner": ppo}})
    parts = mixing.mixed(team.spec, team.lifted.groups, on_replay=True)
    assert parts.teams == ((0, 1, 2),) and parts.indices == (0,)
    assert not mixing.mixed(team.spec, team.lifted.groups, on_replay=False).groups
