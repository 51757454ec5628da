"""Teams, rollouts and a second implementation for the tests of value decomposition."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from team_cases import (
    SMOOTH,
)

import marl
from marl import decomposition, mixing
from marl.agents import dqn, pqn
from marl.envs.interface import AutoReset, TimeStep
from marl.envs.spaces import Box, Discrete
from marl.experience import GroupSteps, TeamRollout

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
