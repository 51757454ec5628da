"""What all tests share: JAX on CPU unless told otherwise, XLA set up as `marl` does, hypothesis."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when jax is imported

from hypothesis import settings

from marl import xla

xla.prepare()

settings.register_profile("marl", deadline=None)  # a first example compiles
settings.load_profile("marl")
