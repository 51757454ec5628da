"""Frozen policies: an agent acts as an agent of another run does, and never learns.

The weights are an hparam that `init` puts into the state (see `marl.agents.learner.Given`). Config
is the shape of the policy alone, so that opponents of one learner and config act under one `vmap`,
and another checkpoint compiles nothing anew.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl import groups
from marl.agents.learner import ActInput, ActOutput, CriticSpace, Given, Learner, Rollout
from marl.agents.validation import at_least
from marl.envs import spaces
from marl.envs.spaces import SpaceTree

CRITIC = None  # no critic of its own


@dataclass(frozen=True)
class Config:
    """Whose policy it is."""

    run: str = ""  # directory of the run; or a folder of one policy, such as runs/mine/frozen/prey
    agent: str = ""  # its id in that run; empty: the same id
    best: bool = False  # the weights of the best evaluation, not the last
    seed: int = 0  # which of the run's seeds, by index
    greedy: bool = False  # act by the mode

    def __post_init__(self):
        at_least("seed", self.seed, 0)


class Hparams(NamedTuple):
    """There are no floats to choose."""


@dataclass(frozen=True)
class Player:
    """What `bind` makes of a `Config`: the shape of a policy. Equal ones form one group."""

    algorithm: Any  # that it was trained with
    config: Any  # of that algorithm
    num_ids: int  # members of its sharing set, if it is told which of them it is; else 0
    greedy: bool


class Played(NamedTuple):
    """What `bind` makes of `Hparams`."""

    policy: Given  # a `State`


class State(NamedTuple):
    """What acting reads; it never changes."""

    weights: dict[str, jax.Array]  # leaves of `Trained` by key path
    agent_id: Any  # [num_ids] one-hot, or ()


class Trained(NamedTuple):
    """What its own algorithm acts with."""

    state: Any
    hparams: Any


class Parts(NamedTuple):
    """What `make` captures; static."""

    learner: Learner  # of its own algorithm
    like: Trained  # shapes
    reads: tuple[str, ...]  # key paths of the leaves that acting reads


def bind(env: Any, agent: str, config: Config, hparams: Hparams) -> tuple[Player, Played]:
    """Find the policy that `agent` of `env` acts by.

    Raises:
      UsageError: there is no such policy, or it is made for other spaces.
    """
    del hparams
    from marl import policy_files  # reads runs, which are made of teams

    return policy_files.find(env, agent, config)


def make(
    config: Player,
    observation_space: SpaceTree,
    action_space: SpaceTree,
    critic_space: CriticSpace | None,
) -> Learner:
    """The policy as a learner.

    Args:
      config: from `bind`.
      observation_space, action_space: those that it was trained with.
      critic_space: not read, as there is no critic.
    """
    del critic_space
    parts = make_parts(config, spaces.signature(observation_space), spaces.signature(action_space))
    greedy = partial(act, parts, "act_greedy")
    return Learner(
        init=init,
        initial_memory=parts.learner.initial_memory,
        act=greedy if config.greedy else partial(act, parts, "act"),
        act_greedy=greedy,
        update=update,
        experience="rollout",
    )


def init(key: jax.Array, hparams: Played) -> State:
    """The weights that were given."""
    del key
    return hparams.policy  # type: ignore[return-value]  # the arrays of a `Given`, a State


def act(
    parts: Parts, mode: str, key: jax.Array, state: State, inputs: ActInput, hparams: Any
) -> ActOutput:
    """Actions [B, ...]; schedules of exploration are at their end."""
    del hparams
    trained = _trained(parts.like, state.weights)
    obs = inputs.obs
    if not isinstance(state.agent_id, tuple):
        obs = groups.with_id(obs, state.agent_id, inputs.reset.shape)
    inputs = inputs._replace(obs=obs, env_steps=float("inf"))
    out = getattr(parts.learner, mode)(key, trained.state, inputs, trained.hparams)
    return out._replace(extras=())


def update(
    key: jax.Array, state: State, experience: Rollout, hparams: Any
) -> tuple[State, dict[str, jax.Array]]:
    """Nothing is learned."""
    del key, experience, hparams
    return state, {}


@lru_cache(maxsize=64)
def make_parts(player: Player, observation: tuple[Any, ...], action: tuple[Any, ...]) -> Parts:
    """The learner that the policy was trained with, and what of its state acting reads.

    Its critic, which acting does not ask, is that of an agent on its own.

    Args:
      player: the shape of the policy.
      observation, action: signatures of the agent's spaces, without ids.
    """
    space = spaces.from_signature(observation)
    own = groups.identified_space(space, player.num_ids) if player.num_ids else space
    args = (player.config, own, spaces.from_signature(action), CriticSpace(own))
    learner = player.algorithm.make(*args)
    floats = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), player.algorithm.Hparams())
    state = jax.eval_shape(learner.init, jax.random.key(0), floats)
    like = Trained(state, jax.eval_shape(lambda: floats))
    return Parts(learner, like, _read_by_acting(learner, like, own))


def leaves(tree: Any) -> dict[str, Any]:
    """Leaves by key path, in order."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in found}


def _read_by_acting(learner: Learner, like: Trained, space: SpaceTree) -> tuple[str, ...]:
    """Key paths of the leaves on which actions and memory depend; no optimiser.

    And no critic, but the head of a network that actor and critic share.
    """
    names = list(leaves(like))

    def acted(*values: jax.Array) -> Any:
        trained = _trained(like, dict(zip(names, values, strict=True)))
        memory = learner.initial_memory(1)
        inputs = ActInput(spaces.zeros(space, (1,)), None, memory, jnp.ones(1, bool))
        modes = (learner.act, learner.act_greedy)
        outs = [mode(jax.random.key(0), trained.state, inputs, trained.hparams) for mode in modes]
        return [(out.action, out.memory) for out in outs]

    exported = jax.export.export(jax.jit(acted))(*leaves(like).values())
    return tuple(names[index] for index in exported.module_kept_var_idx)


def _trained(like: Trained, weights: dict[str, jax.Array]) -> Trained:
    """The whole; what acting does not read is 0."""
    whole = [
        weights[name] if name in weights else jnp.zeros(x.shape, x.dtype)
        for name, x in leaves(like).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(like), whole)
