"""Networks: with `cores` and `images` the only files that know haiku.

An observation (any PyTree) becomes `Features` without parameters, once per rollout: vectors,
one-hot integers and flattened arrays concatenated into one vector, images kept apart. A network is
then an encoder per image, a torso over everything, a memory core if there is one, and linear heads,
mostly one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from marl.agents import cores, images
from marl.agents.orthogonal import orthogonal
from marl.agents.validation import one_of, positive_integers
from marl.envs import spaces
from marl.envs.errors import UsageError
from marl.envs.spaces import Box, Discrete, Space, SpaceTree

Activation = Callable[[jax.Array], jax.Array]
ACTIVATIONS: dict[str, Activation] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
}
TORSOS = ("mlp", "mlp_norm", "simba")
IMAGE_ENCODERS = ("cnn", "flatten")


class Features(NamedTuple):
    """An observation as a network reads it."""

    vector: jax.Array  # [..., D] float32
    images: tuple[jax.Array, ...]  # [..., H, W, C], in the dtype the environment gave


def no_memory(batch_size: int) -> Any:
    """Feed-forward networks remember nothing."""
    del batch_size
    return ()


class NetworkSpec(NamedTuple):
    """Static description of a network (hashable)."""

    hidden_sizes: tuple[int, ...]
    activation: str = "tanh"
    torso: str = "mlp"
    num_outputs: int = 1
    output_scale: float = 1.0
    dueling: bool = False  # a value and an advantage stream, each with the last hidden size
    value_head: bool = False  # a second head for one more output, the last, with a scale of 1
    head_sizes: tuple[int, ...] = ()  # hidden layers of each head; not of dueling networks
    core: str = "none"  # one of `cores.CORES`, between the torso and the head
    core_size: int = 0


def check_config(config: Any) -> None:
    """Raise UsageError where a field that names a network or its sizes is not valid."""
    for name in ("hidden_sizes", "critic_hidden_sizes", "head_sizes"):
        positive_integers(name, getattr(config, name, ()))
    one_of("activation", config.activation, ACTIVATIONS)
    one_of("torso", config.torso, TORSOS)
    one_of("image_encoder", config.image_encoder, IMAGE_ENCODERS)
    if config.torso == "simba" and not config.hidden_sizes:
        raise UsageError("torso = 'simba' needs a width: give hidden_sizes at least one entry")


class Network(NamedTuple):
    """`init(key, features) -> params`, and one of two ways to use it; n outputs, see `NetworkSpec`.

    Feed-forward: `apply(params, features) -> [..., n]`. Recurrent, over T steps of B sequences:
    `unroll(params, features, memory, reset, active) -> (outputs [T, B, n], memories)`, with
    features [T, B, ...], memory [B, ...] before the first step, reset and active [T, B] bool as
    `cores.unroll` has them, and memories [T, B, ...] after each step.
    """

    init: Any
    apply: Any  # None in recurrent networks
    unroll: Any = None  # None in feed-forward networks
    initial_memory: Any = no_memory  # batch_size -> memory [batch_size, ...] of fresh episodes


def is_image(space: Space, image_encoder: str) -> bool:
    return isinstance(space, Box) and len(space.shape) == 3 and image_encoder == "cnn"


def features(space: SpaceTree, obs: Any, image_encoder: str = "cnn") -> Features:
    """Turn observations [..., *space] into `Features`, whatever the leading axes."""
    found = spaces.leaves(space)
    values = jax.tree.structure(space, is_leaf=spaces.is_space).flatten_up_to(obs)
    batch = _batch_shape(found, values)
    vectors, images = [], []
    for leaf, value in zip(found, values, strict=True):
        if is_image(leaf, image_encoder):
            images.append(value)
        else:
            vectors.append(_vector(leaf, value).reshape(*batch, -1))
    vector = jnp.concatenate(vectors, -1) if vectors else jnp.zeros((*batch, 0))
    return Features(vector, tuple(images))


def zero_features(space: SpaceTree, image_encoder: str = "cnn") -> Features:
    """Features of a batch of one, for initialisation; raises TypeError where a leaf is no space."""
    spaces.leaves(space)
    return features(space, spaces.zeros(space, (1,)), image_encoder)


def continuous_mask(space: SpaceTree, image_encoder: str = "cnn") -> np.ndarray:
    """[D] bool: which elements of `Features.vector` come from a Box and may be normalised."""
    parts = [
        np.full(_vector_size(leaf), isinstance(leaf, Box))
        for leaf in spaces.leaves(space)
        if not is_image(leaf, image_encoder)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, bool)


def make_network(spec: NetworkSpec) -> Network:
    """An encoder per image, the torso, and one linear head with orthogonal initialisation.

    Dueling networks (Wang et al. 2016, arXiv:1511.06581, equation 9) have two heads, the last
    hidden layer of each its own. With `value_head` there are two that read the same.
    """
    assert not (spec.dueling and (spec.value_head or spec.head_sizes))
    if spec.core != "none":
        return _make_recurrent(spec)

    def forward(inputs: Features) -> jax.Array:
        x, batch = _encode(inputs, spec)
        return _heads(_torso(x, spec, _torso_sizes(spec)), spec).T.reshape(*batch, -1)

    transformed = hk.without_apply_rng(hk.transform(forward))
    return Network(transformed.init, transformed.apply)


def rescale_outputs(params: Any, scale: jax.Array, shift: jax.Array) -> Any:
    """Parameters of a network whose outputs are `scale * y + shift` where those of `params` are y.

    Only the linear layer made last changes: the head, or the head of the value. Of networks of
    `make_network` that are not dueling.
    """
    layers = [name for name in params if name.split("_")[0] == "linear"]
    head = max(layers, key=lambda name: (len(name), name))  # "linear", "linear_1", as they are made
    w, b = params[head]["w"], params[head]["b"]
    return params | {head: {"w": scale * w, "b": scale * b + shift}}


def _make_recurrent(spec: NetworkSpec) -> Network:
    """With a core after the torso; all but the core runs over [T * B] at once."""

    def forward(inputs: Features, memory: Any, reset: jax.Array, active: jax.Array) -> Any:
        x, batch = _encode(inputs, spec)
        x = _torso(x, spec, _torso_sizes(spec))
        x, memories = cores.unroll(spec.core, spec.core_size, x, memory, reset, active)
        return _heads(x, spec).T.reshape(*batch, -1), memories

    transformed = hk.without_apply_rng(hk.transform(forward))
    memory = partial(cores.initial_memory, spec.core, spec.core_size)

    def init(key: jax.Array, inputs: Features) -> Any:
        sequences = jax.tree.map(lambda x: x[None], inputs)
        size = inputs.vector.shape[0]
        flags = jnp.zeros((1, size), bool)
        return transformed.init(key, sequences, memory(size), flags, ~flags)

    return Network(init, None, transformed.apply, memory)


def _encode(inputs: Features, spec: NetworkSpec) -> tuple[jax.Array, tuple[int, ...]]:
    """What the torso reads, [D, N], and the leading axes that N stands for."""
    activation = ACTIVATIONS[spec.activation]
    encoded = [images.encode(image, activation) for image in inputs.images]
    x = jnp.concatenate([inputs.vector, *encoded], -1)
    return x.reshape(-1, x.shape[-1]).T, x.shape[:-1]


def _torso_sizes(spec: NetworkSpec) -> tuple[int, ...]:
    """Hidden layers before the heads; the last is in those of dueling networks."""
    return spec.hidden_sizes[:-1] if spec.dueling else spec.hidden_sizes


def _heads(x: jax.Array, spec: NetworkSpec) -> jax.Array:
    """All outputs [n, N] of what torso and core made, [D, N]."""
    if spec.dueling:
        value = _head(x, spec, spec.hidden_sizes[-1:], 1)
        advantage = _head(x, spec, spec.hidden_sizes[-1:], spec.num_outputs)
        return value + advantage - jnp.mean(advantage, 0)
    outputs = _head(x, spec, spec.head_sizes, spec.num_outputs)
    if not spec.value_head:
        return outputs
    value = _head(x, spec._replace(output_scale=1.0), spec.head_sizes, 1)
    return jnp.concatenate([outputs, value])


def make_mixer(num_values: int, width: int = 32, hyper_width: int = 64) -> Network:
    """A network that mixes values, monotonic in each: its weights are absolute values.

    Rashid et al. 2018 (arXiv:1803.11485, section 4): the weights come from the state. They start
    alike, so that the mixture starts near the sum of the values.
    `init(key, values, state)`, `apply(params, values [..., n], state [..., D]) -> [...]`.
    """

    def forward(values: jax.Array, state: jax.Array) -> jax.Array:
        def of_state(size: int, *hidden: int, start: float = 0.0) -> jax.Array:
            x = hk.nets.MLP(hidden, activate_final=True)(state) if hidden else state
            w_init, b_init = _orthogonal(0.01), hk.initializers.Constant(start)
            return hk.Linear(size, w_init=w_init, b_init=b_init)(x)

        even = width**-0.5
        weights = jnp.abs(of_state(num_values * width, hyper_width, start=even))
        weights = weights.reshape(*state.shape[:-1], num_values, width)
        mixed = jnp.sum(values[..., None] * weights, -2) + of_state(width)
        final = jnp.abs(of_state(width, hyper_width, start=even))
        return jnp.sum(jax.nn.elu(mixed) * final, -1) + of_state(1, width)[..., 0]

    transformed = hk.without_apply_rng(hk.transform(forward))
    return Network(transformed.init, transformed.apply)


def _batch_shape(found: list[Space], values: list[jax.Array]) -> tuple[int, ...]:
    value, leaf = values[0], found[0]
    return value.shape[: value.ndim - len(leaf.shape)]


def _vector_size(space: Space) -> int:
    if isinstance(space, Box):
        return space.size
    return space.n if isinstance(space, Discrete) else sum(space.nvec)


def _vector(space: Space, value: jax.Array) -> jax.Array:
    if isinstance(space, Box):
        return value.astype(jnp.float32)
    if isinstance(space, Discrete):
        return jax.nn.one_hot(value, space.n)
    parts = [jax.nn.one_hot(value[..., i], n) for i, n in enumerate(space.nvec)]
    return jnp.concatenate(parts, -1)


class _Linear(hk.Module):
    """`activation(w x + b)` of x [inputs, N], with weights [size, inputs].

    With the batch last, the three products of a training step all have a long last axis, which a
    CPU multiplies 1.5 times faster than the weights' gradient of the usual layout.

    On a CPU the activation works on a view [size, N, 1] of the sums. Were it elementwise in its
    input, XLA would write it over the product; then LLVM cannot tell that input and output are
    apart and computes one element at a time, 7 times slower for tanh (legacy emitters: see
    `marl.xla.compiler_options`).
    """

    def __init__(self, size: int, scale: float, activation: Activation | None = None):
        super().__init__(name="linear")
        self.size, self.scale, self.activation = size, scale, activation

    def __call__(self, x: jax.Array) -> jax.Array:
        w_init = _orthogonal(self.scale)
        w = hk.get_parameter("w", (self.size, x.shape[0]), init=w_init)
        b = hk.get_parameter("b", (self.size,), init=jnp.zeros)
        if self.activation is None:
            return w @ x + b[:, None]
        if jax.default_backend() != "cpu":
            return self.activation(w @ x + b[:, None])
        return self.activation((w @ x)[..., None] + b[:, None, None])[..., 0]


def _orthogonal(scale: float) -> Any:
    """A haiku initialiser."""
    return lambda shape, dtype: orthogonal(hk.next_rng_key(), tuple(shape), scale).astype(dtype)


def _head(
    x: jax.Array, spec: NetworkSpec, hidden_sizes: tuple[int, ...], num_outputs: int
) -> jax.Array:
    """Hidden layers and one linear layer: [inputs, N] to [num_outputs, N]."""
    x = _torso(x, spec, hidden_sizes)
    return jax.lax.optimization_barrier(_Linear(num_outputs, spec.output_scale)(x))


def _torso(x: jax.Array, spec: NetworkSpec, hidden_sizes: tuple[int, ...]) -> jax.Array:
    if not hidden_sizes:
        return x
    if spec.torso == "simba":
        return _simba(x, hidden_sizes)
    mlp = _mlp_norm if spec.torso == "mlp_norm" else _mlp
    return mlp(x, hidden_sizes, ACTIVATIONS[spec.activation])


def _mlp(x: jax.Array, hidden_sizes: tuple[int, ...], activation: Activation) -> jax.Array:
    for size in hidden_sizes:
        x = _Linear(size, np.sqrt(2), activation)(x)
    return x


def _mlp_norm(x: jax.Array, hidden_sizes: tuple[int, ...], activation: Activation) -> jax.Array:
    """Layer norm (Ba et al. 2016, arXiv:1607.06450) between each product and its activation."""
    for size in hidden_sizes:
        x = activation(_normalise(_Linear(size, np.sqrt(2))(x)))
    return x


def _normalise(x: jax.Array) -> jax.Array:
    """Layer norm of each column of x [size, N]."""
    return hk.LayerNorm(0, True, True, param_axis=0, name="layer_norm")(x)


def _simba(x: jax.Array, hidden_sizes: tuple[int, ...]) -> jax.Array:
    """Residual blocks with layer norm (SimBa, Lee et al. 2024, arXiv:2410.09754, section 4).

    The width is the first hidden size, the number of blocks the number of hidden sizes.
    """
    width = hidden_sizes[0]
    x = _Linear(width, 1.0)(x)
    for _ in hidden_sizes:
        y = _Linear(4 * width, np.sqrt(2), jax.nn.relu)(_normalise(x))
        x = x + _Linear(width, 1.0)(y)
    return _normalise(x)
