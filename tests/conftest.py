"""What all tests share: JAX on CPU unless told otherwise, XLA set up as `marl` does, hypothesis."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when jax is imported

import jax
from hypothesis import settings

from marl import xla

xla.prepare()
# tests compile many small programs: keep those too, a second run is then several times faster
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)

settings.register_profile("marl", deadline=None)  # a first example compiles
settings.load_profile("marl")
