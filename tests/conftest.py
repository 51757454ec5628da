"""What all tests share: JAX on CPU unless told otherwise, XLA set up as `marl` does, hypothesis."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when jax is imported

import jax
import pytest
from hypothesis import settings
from jaxlib.version import __version_info__ as jaxlib_version

from marl import dispatch, evaluation, program, xla

xla.prepare()
# what `marl` compiles with, for everything that tests jit themselves
flags = [os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=2"]
if jaxlib_version < (0, 11, 1):  # which ends the process for a flag that it does not know
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(flags).strip()
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
