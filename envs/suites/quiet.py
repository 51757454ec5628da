"""Keeping noisy packages quiet while they are imported, build something or are traced."""

import contextlib
import io
import sys
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Swallows what is printed and warned of, and undoes a replacing of stdout and stderr."""
    names = ("stdout", "stderr", "__stdout__", "__stderr__")
    streams = {name: getattr(sys, name) for name in names}
    sink = io.StringIO()
    try:
        for name in names:
            setattr(sys, name, sink)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, stream in streams.items():
            setattr(sys, name, stream)


@contextlib.contextmanager
def quiet_mujoco() -> Iterator[None]:
    """Keeps MuJoCo from writing its warnings to MUJOCO_LOG.TXT in the working directory."""
    import mujoco

    handler = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda message: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(handler)
