"""Q-learners a second time, as plainly as they can be written, and what their tests share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from learner_cases import Case, act_input
from ppo_reference import ReferenceAdam

from marl.agents.learner import Rollout
from marl.agents.optimizer import NetworkState
from marl.agents.q_learning import State
from marl.envs.spaces import Box, Discrete

SPACE = Box((3,))


def case_of(algorithm, **config):
    config = algorithm.Config(**{"hidden_sizes": (8,)} | config)
    return Case(algorithm, config, SPACE, Discrete(4), (), masked=True)


def linear_params(bias):
    """A network without hidden layers that gives `bias` whatever it sees."""
    bias = np.asarray(bias, np.float32)
    return {"linear": {"w": np.zeros((len(bias), SPACE.size), np.float32), "b": bias}}


def linear_state(online, target=()):
    """A state whose networks give these values whatever they see; it cannot learn."""
    target = target if target == () else linear_params(target)
    return State(NetworkState(linear_params(online), ()), target, np.int32(0))


def inputs(batch, mask=None, env_steps=np.inf):
    """What `batch` environments hand to `act`."""
    given = act_input(np.zeros((batch, SPACE.size), np.float32), mask)
    return given._replace(env_steps=np.float32(env_steps))


def transitions(**fields):
    """A rollout of which only `fields` are given: what is not given is off, or None."""
    shape = fields["reward"].shape
    off = dict.fromkeys(("terminated", "truncated", "reset"), np.zeros(shape, bool))
    rest = {"weight": np.ones(shape, np.float32), "env_steps": np.float32(0.0)}
    return Rollout(**dict.fromkeys(Rollout._fields) | off | rest | fields)


def reference_q(params, x):
    """Layers in the order of their names, layer norm if there is any, relu between them."""

    def named(kind):
        return [params[name] for name in sorted(params, key=lambda n: (len(n), n)) if kind in name]

    *hidden, head = named("linear")
    norms = named("norm")
    for number, layer in enumerate(hidden):
        x = x @ layer["w"].T + layer["b"]
        if norms:
            x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
            x = x * norms[number]["scale"].ravel() + norms[number]["offset"].ravel()
        x = jnp.maximum(x, 0.0)
    return x @ head["w"].T + head["b"]


def reference_descent(params, hparams, obs, action, target, steps):
    """`steps` of Adam on half the mean squared error; (params, means of metrics over the steps)."""

    def loss(params):
        q = reference_q(params, obs)
        estimate = jnp.stack([q[i, a] for i, a in enumerate(action)])
        error = estimate - target
        found = {"q_mean": jnp.mean(estimate), "td_error": jnp.mean(jnp.abs(error))}
        return 0.5 * jnp.mean(error**2), found

    h = jax.tree.map(float, hparams)
    adam = ReferenceAdam(h.learning_rate, h.adam_epsilon, h.max_grad_norm)
    gradient, metrics = jax.jit(jax.value_and_grad(loss, has_aux=True)), []
    for _ in range(steps):
        (value, found), grads = gradient(params)
        params, norm = adam.step(params, grads)
        metrics.append(found | {"loss": value, "grad_norm": norm})
    return params, {name: np.mean([float(m[name]) for m in metrics]) for name in metrics[0]}


class Chain(NamedTuple):
    """Three states and two actions, with every transition once: [1, 6].

    Action 1 moves right, action 0 stays; each move from state 2 is worth 1 and ends the episode.
    Staying costs 0.1 in state 0, where the time limit truncates the episode.
    """

    rollout: Rollout
    states: np.ndarray  # [3, 3] one-hot
    values: np.ndarray  # [3, 2] of the best policy


def chain(gamma):
    eye = np.eye(3, dtype=np.float32)
    state, action = np.repeat(np.arange(3), 2), np.tile(np.arange(2), 3)
    following = np.minimum(state + action, 2)
    reward = np.where((state == 2) & (action == 1), 1.0, np.where(state + action == 0, -0.1, 0.0))
    terminated = (state == 2) & (action == 1)
    values = np.zeros((3, 2))
    for _ in range(200):
        best = values.max(-1)[following]
        values = (reward + gamma * np.where(terminated, 0.0, best)).reshape(3, 2)
    rollout = transitions(
        obs=eye[state][None],
        action=action[None].astype(np.int32),
        final_obs=eye[following][None],
        reward=reward[None].astype(np.float32),
        terminated=terminated[None],
        truncated=(state + action == 0)[None],
        shuffle_key=jax.random.key(0),
    )
    return Chain(rollout, eye, values)


def trained_on_chain(algorithm, config, updates, **hparams):
    """(learned values, the best policy's values), each [3, 2]."""
    given = jax.tree.map(jnp.asarray, chain(gamma=0.8))
    case = Case(algorithm, config, SPACE, Discrete(2), ())
    learner, floats = case.learner(), case.hparams(gamma=0.8, **hparams)

    def step(state, key):
        rollout = given.rollout._replace(shuffle_key=key)
        return learner.update(key, state, rollout, floats)[0], None

    @jax.jit
    def train(key):
        state = learner.init(key, floats)
        state, _ = jax.lax.scan(step, state, jax.random.split(key, updates))
        return learner.q_values(state.network.params, given.states)

    return np.asarray(train(jax.random.key(0))), given.values
