"""Observations as features, and networks over them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_cases import all_finite, sampled

from marl.agents import images, networks
from marl.agents.networks import NetworkSpec, features, make_network
from marl.envs.spaces import Box, Discrete, MultiDiscrete

COMPOSITE = {
    "view": Box((3, 4, 2), 0, 255, "uint8"),
    "kind": Discrete(3),
    "parts": (MultiDiscrete((2, 3)), Box((2, 2))),
}


@pytest.mark.parametrize(
    "space, obs, expected",
    [
        (Box((2,)), [1.5, -2.0], [1.5, -2.0]),
        (Box((2, 2)), [[1, 2], [3, 4]], [1, 2, 3, 4]),
        (Box(()), 3.0, [3.0]),
        (Box((2,), 0, 255, "uint8"), [7, 255], [7, 255]),
        (Discrete(3), 2, [0, 0, 1]),
        (MultiDiscrete((2, 3)), [1, 0], [0, 1, 1, 0, 0]),
    ],
)
def test_features_of_a_leaf(space, obs, expected):
    found = features(space, jnp.asarray(obs, space.dtype))
    assert found.vector.dtype == jnp.float32 and found.images == ()
    np.testing.assert_array_equal(found.vector, np.asarray(expected, np.float32))


def test_features_of_a_composite_come_in_pytree_order():
    view = jnp.arange(24, dtype=jnp.uint8).reshape(3, 4, 2)
    obs = {
        "view": view,
        "kind": jnp.int32(1),
        "parts": (jnp.array([1, 2]), jnp.array([[1.0, 2.0], [3.0, 4.0]])),
    }
    found = features(COMPOSITE, obs)
    # kind, then parts[0], then parts[1]; the image stays apart, in its own dtype
    np.testing.assert_array_equal(found.vector, [0, 1, 0, 0, 1, 0, 0, 1, 1, 2, 3, 4])
    np.testing.assert_array_equal(found.images[0], view)
    assert found.images[0].dtype == jnp.uint8
    flat = features(COMPOSITE, obs, "flatten")
    assert flat.images == () and flat.vector.shape == (12 + 24,)
    np.testing.assert_array_equal(flat.vector[12:], view.reshape(-1))


def test_an_image_alone_has_an_empty_vector():
    found = features(Box((3, 4, 2)), jnp.zeros((5, 3, 4, 2)))
    assert found.vector.shape == (5, 0) and found.images[0].shape == (5, 3, 4, 2)


@pytest.mark.parametrize("image_encoder", networks.IMAGE_ENCODERS)
def test_only_boxes_may_be_normalised(image_encoder):
    mask = networks.continuous_mask(COMPOSITE, image_encoder)
    expected = [False] * 8 + [True] * 4 + [True] * (24 if image_encoder == "flatten" else 0)
    np.testing.assert_array_equal(mask, expected)
    zeros = networks.zero_features(COMPOSITE, image_encoder)
    assert zeros.vector.shape == (1, len(mask))


@pytest.fixture(scope="module", params=networks.TORSOS)
def composite(request):
    """A network over the composite, its parameters, and features of observations [6, 2]."""
    spec = NetworkSpec((8, 8), torso=request.param, num_outputs=3)
    network = make_network(spec)
    found = features(COMPOSITE, sampled(0, COMPOSITE, (6, 2)))
    params = jax.jit(network.init)(jax.random.key(1), networks.zero_features(COMPOSITE))
    return jax.jit(network.apply), params, found


def test_leading_axes_are_carried_along(composite):
    apply, params, found = composite
    outputs = apply(params, found)
    assert outputs.shape == (6, 2, 3) and outputs.dtype == jnp.float32
    flat = jax.tree.map(lambda x: x.reshape(12, *x.shape[2:]), found)
    np.testing.assert_allclose(apply(params, flat).reshape(6, 2, 3), outputs, rtol=1e-5, atol=1e-5)
    one = jax.tree.map(lambda x: x[4, 1], found)
    np.testing.assert_allclose(apply(params, one), outputs[4, 1], rtol=1e-4, atol=1e-5)


def test_gradients_are_finite_and_reach_every_parameter(composite):
    apply, params, found = composite
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(jnp.square(apply(p, found)))))(params)
    assert all_finite(gradient)
    assert all(np.any(np.asarray(leaf) != 0.0) for leaf in jax.tree.leaves(gradient))


def test_every_input_is_read(composite):
    apply, params, found = composite
    zero_vector = found._replace(vector=jnp.zeros_like(found.vector))
    zero_image = found._replace(images=tuple(jnp.zeros_like(x) for x in found.images))
    outputs = apply(params, found)
    for changed in (zero_vector, zero_image):
        assert np.max(np.abs(apply(params, changed) - outputs)) > 1e-3


def mlp(params, x, activation):
    """A second implementation: layers in order of their number, the last one linear."""
    *hidden, head = sorted(params, key=lambda name: (len(name), name))
    for name in hidden:
        x = activation(x @ np.asarray(params[name]["w"]).T + np.asarray(params[name]["b"]))
    return x @ np.asarray(params[head]["w"]).T + np.asarray(params[head]["b"])


@pytest.mark.parametrize(
    "activation, function", [("tanh", np.tanh), ("relu", lambda x: np.maximum(x, 0.0))]
)
def test_an_mlp_by_hand(activation, function):
    network = make_network(NetworkSpec((8, 4), activation, num_outputs=2))
    found = features(Box((3,)), jax.random.normal(jax.random.key(0), (5, 3)))
    params = jax.jit(network.init)(jax.random.key(1), found)
    expected = mlp(params, np.asarray(found.vector), function)
    np.testing.assert_allclose(network.apply(params, found), expected, rtol=1e-4, atol=1e-5)


def test_an_mlp_without_hidden_layers_is_linear():
    network = make_network(NetworkSpec((), num_outputs=2))
    zeros = networks.zero_features(Box((3,)))
    params = jax.eval_shape(network.init, jax.random.key(1), zeros)
    assert [leaf.shape for leaf in jax.tree.leaves(params)] == [(2,), (2, 3)]


def assert_orthogonal(w, scale):
    """Orthogonal rows or columns, whichever are fewer, of length `scale`."""
    w = np.asarray(w)
    gram = w.T @ w if w.shape[0] >= w.shape[1] else w @ w.T
    np.testing.assert_allclose(gram, scale**2 * np.eye(len(gram)), atol=1e-5)


def test_weights_start_orthogonal_and_biases_at_zero():
    network = make_network(NetworkSpec((8, 16), num_outputs=4, output_scale=0.01))
    params = jax.jit(network.init)(jax.random.key(0), networks.zero_features(Box((12,))))
    layers = [params[name] for name in sorted(params)]
    scales = [np.sqrt(2), np.sqrt(2), 0.01]
    for layer, shape, scale in zip(layers, [(8, 12), (16, 8), (4, 16)], scales, strict=True):
        assert layer["w"].shape == shape
        assert_orthogonal(layer["w"], scale)
        np.testing.assert_array_equal(layer["b"], 0.0)


def test_convolutions_start_orthogonal(composite):
    _, params, _ = composite
    kernels = [module["w"] for name, module in params.items() if "conv" in name.lower()]
    assert sorted(kernel.shape for kernel in kernels) == [(18, 32), (288, 32), (288, 32)]
    for kernel in kernels:
        assert_orthogonal(kernel, np.sqrt(2))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(5, 5), (6, 4), (9, 7), (1, 1), (2, 3)])
def test_shifted_slices_are_a_convolution(size, stride):
    """The CPU's product and everybody else's `lax.conv` share parameters."""
    x = jax.random.normal(jax.random.key(0), (2, 3, *size, 4))
    w = jax.random.normal(jax.random.key(1), (9 * 4, 5))
    slices, conv = images._conv_slices(x, w, stride), images._conv_lax(x, w, stride)
    assert slices.shape == (2, 3, *(-(-n // stride) for n in size), 5)
    np.testing.assert_allclose(slices, conv, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels, scale", [(4, 255.0), (5, 1.0)])
def test_pixels_are_scaled_and_feature_planes_are_not(channels, scale):
    image = jax.random.randint(jax.random.key(0), (1, 3, 3, channels), 0, 256).astype(jnp.uint8)
    network = make_network(NetworkSpec((), "relu", num_outputs=4))
    bytes_, floats = (
        networks.Features(jnp.zeros((1, 0)), (x,)) for x in (image, image.astype(jnp.float32))
    )
    shapes = jax.eval_shape(network.init, jax.random.key(0), bytes_)
    generator = np.random.default_rng(0)
    params = jax.tree.map(lambda x: generator.normal(size=x.shape).astype(np.float32) / 9, shapes)
    apply = jax.jit(network.apply)
    scaled = floats._replace(images=(floats.images[0] / scale,))
    np.testing.assert_allclose(apply(params, bytes_), apply(params, scaled), rtol=1e-4)


@pytest.mark.parametrize(
    "size, features_out",
    [
        ((8, 8), 8 * 8 * 32),  # small: no stride
        ((9, 20), 5 * 10 * 32),  # halved once: min(9, 20) > 8, then min(5, 10) is not
        ((40, 40), 5 * 5 * 32),  # 20, 10, 5
    ],
)
def test_large_images_are_halved(size, features_out):
    network = make_network(NetworkSpec((), num_outputs=1))
    zeros = networks.zero_features(Box((*size, 1), 0, 255, "uint8"))
    shapes = jax.eval_shape(network.init, jax.random.key(0), zeros)
    assert shapes["linear"]["w"].shape == (1, features_out)


def in_order(params, kind):
    """The modules of a kind in the order of their construction."""
    return [params[name] for name in sorted(params, key=lambda n: (len(n), n)) if kind in name]


def linear(layer, x):
    return x @ layer["w"].T + layer["b"]


def normalised(norm, x):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * norm["scale"].ravel() + norm["offset"].ravel()


def simba(params, x, blocks):
    """A second implementation of arXiv:2410.09754, section 4, in the order of construction."""
    layers, norms = iter(in_order(params, "linear")), iter(in_order(params, "norm"))
    x = linear(next(layers), x)
    for _ in range(blocks):
        hidden = np.maximum(linear(next(layers), normalised(next(norms), x)), 0.0)
        x = x + linear(next(layers), hidden)
    return linear(next(layers), normalised(next(norms), x))


def test_simba_by_hand():
    """Residual blocks of the first width, one per hidden size."""
    network = make_network(NetworkSpec((8, 8), torso="simba", num_outputs=2))
    found = networks.Features(np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32), ())
    shapes = jax.eval_shape(network.init, jax.random.key(0), found)
    linear = [shapes[name]["w"].shape for name in sorted(shapes) if "linear" in name]
    assert linear == [(8, 3), (32, 8), (8, 32), (32, 8), (8, 32), (2, 8)]
    generator = np.random.default_rng(1)
    params = jax.tree.map(lambda x: generator.normal(size=x.shape).astype(np.float32), shapes)
    outputs = jax.jit(network.apply)(params, found)
    np.testing.assert_allclose(outputs, simba(params, found.vector, 2), rtol=1e-3, atol=1e-3)


def mlp_norm(layers, norms, x, activation):
    """A second implementation: product, layer norm over the units, activation."""
    for layer, norm in zip(layers, norms, strict=True):
        x = activation(normalised(norm, linear(layer, x)))
    return x


def random_network(spec, seed=0):
    """(network, random parameters, features [5])."""
    network, generator = make_network(spec), np.random.default_rng(seed)
    found = networks.Features(generator.normal(size=(5, 3)).astype(np.float32), ())
    shapes = jax.eval_shape(network.init, jax.random.key(0), found)
    params = jax.tree.map(lambda x: generator.normal(size=x.shape).astype(np.float32), shapes)
    return network, params, found


def test_layer_norm_stands_before_the_activation():
    spec = NetworkSpec((8, 4), "tanh", torso="mlp_norm", num_outputs=2)
    network, params, found = random_network(spec)
    *layers, head = in_order(params, "linear")
    hidden = mlp_norm(layers, in_order(params, "norm"), found.vector, np.tanh)
    outputs = jax.jit(network.apply)(params, found)
    np.testing.assert_allclose(outputs, linear(head, hidden), rtol=1e-4, atol=1e-4)


def test_layer_norm_starts_neutral():
    network = make_network(NetworkSpec((8,), torso="mlp_norm"))
    params = jax.jit(network.init)(jax.random.key(0), networks.zero_features(Box((3,))))
    (norm,) = in_order(params, "norm")
    np.testing.assert_array_equal(norm["scale"].ravel(), np.ones(8))
    np.testing.assert_array_equal(norm["offset"].ravel(), np.zeros(8))


@pytest.mark.parametrize("hidden_sizes", [(8, 4), ()])
def test_dueling_by_hand(hidden_sizes):
    """One shared layer, then a layer and a head of its own for the value and for advantages."""
    spec = NetworkSpec(hidden_sizes, "tanh", torso="mlp_norm", num_outputs=3, dueling=True)
    network, params, found = random_network(spec)
    layers, norms, x = in_order(params, "linear"), in_order(params, "norm"), found.vector
    if hidden_sizes:
        x = mlp_norm(layers[:1], norms[:1], x, np.tanh)
        value = linear(layers[2], mlp_norm(layers[1:2], norms[1:2], x, np.tanh))
        advantage = linear(layers[4], mlp_norm(layers[3:4], norms[2:], x, np.tanh))
    else:
        value, advantage = linear(layers[0], x), linear(layers[1], x)
    assert value.shape == (5, 1) and advantage.shape == (5, 3)
    expected = value + advantage - advantage.mean(-1, keepdims=True)
    outputs = jax.jit(network.apply)(params, found)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("torso", networks.TORSOS)
def test_dueling_outputs_average_to_the_value(torso):
    """A value that is shifted shifts every output; advantages that are shifted change nothing."""
    spec = NetworkSpec((8, 8), torso=torso, num_outputs=3, dueling=True)
    network, params, found = random_network(spec)
    apply = jax.jit(network.apply)
    outputs = apply(params, found)
    heads = {name: layer["b"].shape[0] for name, layer in params.items() if "linear" in name}
    for size, shift in ((1, 2.0), (3, 0.0)):
        (name,) = (name for name, outputs_of in heads.items() if outputs_of == size)
        changed = params | {name: params[name] | {"b": params[name]["b"] + 2.0}}
        np.testing.assert_allclose(apply(changed, found), outputs + shift, rtol=1e-4, atol=1e-3)
