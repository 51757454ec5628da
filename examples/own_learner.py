"""A learner of one's own: REINFORCE, beside PPO in one team.

python examples/own_learner.py
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import marl
from marl.agents import losses, networks, returns
from marl.agents.learner import ActInput, ActOutput, Learner, Rollout
from marl.agents.networks import Features, Network, NetworkSpec
from marl.agents.policies import Policy


@dataclass(frozen=True)
class Config:
    """What changes shapes or control flow."""

    hidden_sizes: tuple[int, ...] = ()  # empty: a linear policy


class Hparams(NamedTuple):
    """Floats, each of which may differ per agent."""

    learning_rate: Any = 0.01
    gamma: Any = 0.99


BOUNDS = {"gamma": (0.0, 1.0)}  # (lowest, highest); others must be at least 0


class State(NamedTuple):
    params: Any
    optimizer: optax.OptState


class Parts(NamedTuple):
    """What `make` captures; static."""

    policy: Policy
    network: Network
    features: Any  # observations -> Features
    zeros: Features  # of a batch of one


def make(config, observation_space, action_space, critic_space) -> Learner:
    """REINFORCE (Williams 1992) for any observations and actions; it has no critic."""
    del critic_space
    policy = Policy(action_space)
    spec = NetworkSpec(config.hidden_sizes, num_outputs=policy.num_outputs, output_scale=0.01)
    parts = Parts(
        policy,
        networks.make_network(spec),
        partial(networks.features, observation_space),
        networks.zero_features(observation_space),
    )
    return Learner(
        init=partial(init, parts),
        initial_memory=lambda batch_size: (),
        act=partial(act, parts),
        act_greedy=partial(act_greedy, parts),
        update=partial(update, parts),
    )


def init(parts: Parts, key, hparams) -> State:
    params = parts.network.init(key, parts.zeros)
    return State(params, optax.adam(hparams.learning_rate).init(params))


def act(parts: Parts, key, state: State, inputs: ActInput, hparams) -> ActOutput:
    outputs = _outputs(parts, state.params, inputs.obs)
    drawn = parts.policy.sample(key, *outputs, inputs.action_mask)
    return ActOutput(drawn.action, inputs.memory, extras={"raw": drawn.raw})


def act_greedy(parts: Parts, key, state: State, inputs: ActInput, hparams) -> ActOutput:
    outputs = _outputs(parts, state.params, inputs.obs)
    action = parts.policy.mode(*outputs, inputs.action_mask)
    return ActOutput(action, inputs.memory, extras=())


def update(parts: Parts, key, state: State, experience: Rollout, hparams):
    """One gradient step on a whole rollout."""
    grads, loss = jax.grad(_loss, argnums=1, has_aux=True)(
        parts, state.params, experience, hparams.gamma
    )
    optimizer = optax.adam(hparams.learning_rate)
    updates, optimizer_state = optimizer.update(grads, state.optimizer)
    state = State(optax.apply_updates(state.params, updates), optimizer_state)
    return state, {"policy_loss": loss}


def _loss(parts: Parts, params, rollout: Rollout, gamma):
    nothing = jnp.zeros_like(rollout.reward)  # without a critic, what lies beyond a cut counts 0
    ends = (rollout.terminated, rollout.truncated)
    _, to_go = returns.gae(rollout.reward, nothing, nothing, *ends, gamma, 1.0)
    advantage = losses.standardise(to_go, rollout.weight)
    outputs = _outputs(parts, params, rollout.obs)
    log_prob = parts.policy.log_prob(
        *outputs, rollout.action_mask, rollout.action, rollout.extras["raw"]
    )
    loss = losses.weighted_mean(-log_prob * advantage, rollout.weight)
    return loss, loss


def _outputs(parts: Parts, params, obs):
    """The network's outputs, and log_std of Box actions, which stays 0 here."""
    return parts.network.apply(params, parts.features(obs)), jnp.zeros(parts.policy.num_scales)


def main(total_steps=50_000):
    env = marl.make("toy/cooperative")
    reinforce = sys.modules[__name__]  # a module is an algorithm: it has Config, Hparams and make
    team = marl.team(env, "ppo", overrides={env.agents[0]: {"learner": reinforce}})
    print(team.describe())
    run = marl.train(env, team, total_steps=total_steps)
    print(run.evaluations[-1]["greedy"]["returns"])


if __name__ == "__main__":
    main()
