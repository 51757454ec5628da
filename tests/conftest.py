"""What all tests share: JAX on CPU unless told otherwise, XLA set up as `marl` does, hypothesis."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when jax is imported

import jax
import pytest
from hypothesis import settings

from marl import dispatch, evaluation, program, xla

xla.prepare()
# what `marl` compiles with, for everything that tests jit themselves
EMITTERS = "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=2"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {EMITTERS}".strip()
# tests compile many small programs: keep those too, a second run is then several times faster
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)

settings.register_profile("marl", deadline=None)  # a first example compiles
settings.load_profile("marl")


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Compiled programs of one module are of no use to the next.

    Each maps some hundred pieces of memory, and a process may map only so many: XLA's compiler ends
    in a segmentation fault at the limit.
    """
    yield
    for cached in (program.program, evaluation._program, dispatch.lift):
        cached.cache_clear()
    jax.clear_caches()
