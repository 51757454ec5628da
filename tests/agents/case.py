"""A learner to check contracts on, and random inputs of its spaces."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from marl.agents.learner import ActInput, CriticSpace, Learner, MemoryFn
from marl.envs import spaces
from marl.envs.spaces import Box, Discrete, SpaceTree


class Case(NamedTuple):
    """An algorithm bound to spaces, and which contracts it has reason not to keep."""

    algorithm: Any
    config: Any
    observation_space: SpaceTree
    action_space: SpaceTree
    critic_observations: SpaceTree
    masked: bool = False
    context_actions: SpaceTree = ()
    floats: Mapping[str, tuple[float, ...]] = {}  # hparams of three agents, all of which matter
    learns: bool = True  # else its state never changes, and it has no metrics
    explores: bool = True  # its actions depend on the key
    greedy: bool = True  # in evaluation they do not
    replaces: bool = True  # of what has no weight, networks see nothing; else it must be finite

    def learner(self) -> Learner:
        critic_space = CriticSpace(self.critic_observations, self.context_actions)
        return self.algorithm.make(
            self.config, self.observation_space, self.action_space, critic_space
        )

    def hparams(self, **changes: float) -> Any:
        """Strongly typed float32 scalars."""
        return jax.tree.map(
            lambda x: jnp.asarray(x, jnp.float32), self.algorithm.Hparams(**changes)
        )

    def hparams_of(self, agent: int) -> Any:
        """Those of one of the three agents."""
        return self.hparams(**{name: values[agent] for name, values in self.floats.items()})


def sampled(seed: int, space: SpaceTree, batch: tuple[int, ...]) -> Any:
    """Random elements [*batch, ...] of a space; in NumPy, as there is nothing to compile then."""
    generator = np.random.default_rng(seed)

    def leaf(space: spaces.Space) -> np.ndarray:
        shape = (*batch, *space.shape)
        if isinstance(space, Box):
            drawn = generator.normal(size=shape)
            if space.bounded:
                low, high = space.bounds()
                drawn = low + generator.random(shape) * (high - low)
        else:
            sizes = space.n if isinstance(space, Discrete) else np.asarray(space.nvec)
            drawn = generator.integers(0, sizes, shape)
        return drawn.astype(space.dtype)

    return spaces.map_spaces(leaf, space)


def random_mask(seed: int, space: SpaceTree, batch: tuple[int, ...]) -> Any:
    """A mask that leaves at least the last action of every component."""
    generator = np.random.default_rng(seed)

    def component(n: int) -> np.ndarray:
        mask = generator.random((*batch, n)) < 0.5
        mask[..., -1] = True
        return mask

    def leaf(space: spaces.Space) -> Any:
        if isinstance(space, Box):
            return None
        sizes = (space.n,) if isinstance(space, Discrete) else space.nvec
        return np.concatenate([component(n) for n in sizes], -1)

    return spaces.map_spaces(leaf, space)


def act_input(
    obs: Any, mask: Any = None, memory: Any = (), reset: Any = None, active: Any = None
) -> ActInput:
    """The input of a learner, by default of one without memory."""
    batch = jax.tree.leaves(obs)[0].shape[0]
    reset = np.zeros(batch, bool) if reset is None else reset
    return ActInput(obs, mask, memory, reset, np.float32(50.0), active=active)


def random_memory(seed: int, initial: MemoryFn | None, batch_size: int) -> Any:
    """As one may be in the middle of an episode."""
    generator = np.random.default_rng(seed)
    memory = () if initial is None else initial(batch_size)
    return jax.tree.map(lambda x: generator.normal(size=x.shape).astype(np.float32), memory)
