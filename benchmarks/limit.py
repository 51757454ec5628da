"""What no trainer of the same work can beat: `python benchmarks/limit.py --learner sac`.

The time of the environments' steps, plus that of the networks' matrix products, and of nothing
else: no random numbers for acting, activations, replay, shuffles, losses or optimisers. The
products are found in the traced program (shapes, and how often each runs), and each is timed alone,
in a loop, as XLA compiles it. Takes the arguments of `compare.py` that name the work; pin it to a
core, as `compare.py` does.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from common import arguments, cpu_seconds, uses_replay
from run_marl import program_of

from marl import xla
from marl.envs.spaces import Discrete
from marl.program import ProgramSpec, _collect, init_state, train_step, vector_env


class Product(NamedTuple):
    """A matrix product: shapes of its factors, and `lax.dot_general`'s dimension numbers."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    dimensions: Any

    def flops(self) -> int:
        (_, contracted), (_, batch) = self.dimensions
        free = [n for i, n in enumerate(self.right) if i not in (*contracted, *batch)]
        return 2 * math.prod(self.left) * math.prod(free)


def main() -> None:
    work = arguments(__doc__)
    team, spec = program_of(work)
    key = jax.random.key(0)
    state = jax.eval_shape(partial(init_state, spec), key, team.group_hparams())
    number = jnp.int32(0)
    played = partial(environments, spec, actions(spec))
    start = key, jax.jit(vector_env(spec).reset)(key)[1]
    playing = products(played, start)
    acting = products(partial(_collect, spec), key, number, state) - playing
    learning = products(partial(train_step, spec), number, state) - acting - playing
    size = work.num_envs * work.rollout_length
    filling = work.learning_starts // size if uses_replay(work) else 0
    share = 1.0 - filling / spec.max_updates  # of rollouts that are learned from
    seconds = {product: product_seconds(product) for product in acting + learning}

    def total(cost: Callable[[Product], float], found: Counter[Product]) -> float:
        return sum(number * cost(product) for product, number in found.items())

    of_rollout = {
        "environments": seconds_per_call(played, start),
        "acting": total(seconds.__getitem__, acting),
        "learning": share * total(seconds.__getitem__, learning),
    }
    flops = total(Product.flops, acting) + share * total(Product.flops, learning)
    row = {f"{name}_us": round(1e6 * value / size, 2) for name, value in of_rollout.items()}
    row |= {
        "mflop": round(flops / size / 1e6, 3),
        "gflops": round(flops / (of_rollout["acting"] + of_rollout["learning"]) / 1e9, 1),
        "steps_per_cpu_second": round(size / sum(of_rollout.values())),
    }
    print(json.dumps(row))


def environments(spec: ProgramSpec, drawn: Any, carry: Any) -> Any:
    """A rollout of actions drawn before. `carry` has a key, which environments need, and states."""
    env = vector_env(spec)
    key, key_steps = jax.random.split(carry[0])
    keys = jax.random.split(key_steps, (spec.rollout_length, spec.num_envs + 1))

    def step(worlds: Any, inputs: Any) -> Any:
        timestep, worlds = env.step_with(inputs[0], worlds, inputs[1])
        return worlds, (timestep.obs, timestep.final_obs, timestep.reward)

    worlds, out = jax.lax.scan(step, carry[1], (keys, drawn))
    return (key, worlds), out


def actions(spec: ProgramSpec) -> dict[str, np.ndarray]:
    """Random actions [T, B, ...] of a rollout, by agent."""
    random, found = np.random.default_rng(0), {}
    batch = spec.rollout_length, spec.num_envs
    for agent, space in spec.env.action_spaces.items():
        if isinstance(space, Discrete):
            found[agent] = random.integers(space.n, size=batch, dtype=np.int32)
        else:
            found[agent] = random.uniform(*space.bounds(), (*batch, *space.shape)).astype("float32")
    return found


def products(function: Any, *args: Any) -> Counter[Product]:
    """The matrix products of `function`, and how often each runs."""
    return _products(jax.make_jaxpr(function)(*args).jaxpr)


def _products(jaxpr: Any) -> Counter[Product]:
    found: Counter[Product] = Counter()
    for equation in jaxpr.eqns:
        params = equation.params
        if equation.primitive.name == "dot_general":
            left, right = (x.aval.shape for x in equation.invars)
            found[Product(left, right, params["dimension_numbers"])] += 1
        elif equation.primitive.name == "cond":  # the branch that works most
            branches = [_products(branch.jaxpr) for branch in params["branches"]]
            found += max(branches, key=lambda found: found.total())
        else:
            times = params.get("length", 1) if equation.primitive.name == "scan" else 1
            for value in params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    found += Counter({p: n * times for p, n in _products(inner).items()})
    return found


def product_seconds(product: Product) -> float:
    """CPU seconds of one product; a loop in which each depends on the one before it."""
    random = np.random.default_rng(0)
    left, right = (
        jnp.asarray(random.normal(size=shape), jnp.float32)
        for shape in (product.left, product.right)
    )

    def again(factors: tuple[jax.Array, jax.Array]) -> Any:
        left, right = factors
        out = jax.lax.dot_general(left, right, product.dimensions)
        corner = (0,) * out.ndim
        return (left.at[(0,) * left.ndim].set(jnp.tanh(out[corner])), right), out

    return seconds_per_call(again, (left, right))


def seconds_per_call(function: Any, carry: Any, enough: float = 0.3) -> float:
    """CPU seconds of `carry, out = function(carry)` inside a loop; the median of three loops."""
    out = jax.eval_shape(function, carry)[1]
    out = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out)

    def loop(number: jax.Array, start: Any) -> Any:
        return jax.lax.fori_loop(0, number, lambda _, both: function(both[0]), start)

    compiled = jax.jit(loop).lower(jnp.int32(0), (carry, out)).compile(xla.compiler_options())
    number, seconds = 1, 0.0
    while seconds < enough:
        number *= 2
        seconds = cpu_seconds(partial(compiled, jnp.int32(number), (carry, out)))[0]
    runs = [cpu_seconds(partial(compiled, jnp.int32(number), (carry, out)))[0] for _ in range(3)]
    return statistics.median(runs) / number


if __name__ == "__main__":
    xla.prepare()
    main()
