"""What XLA is told before it starts: a scheduler to avoid, where to keep compiled programs."""

import hashlib
import os
import platform
import sys
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

FLAG = "xla_cpu_enable_concurrency_optimized_scheduler"  # known to jaxlib 0.7 to 0.11


def prepare() -> None:
    """Set up XLA; call before the first computation. Calling it again changes nothing.

    On CPU, programs with two independent heavy branches (an actor and a joint critic) can stop for
    ever in XLA's concurrency-optimised scheduler. It is turned off, at no cost in speed, unless
    `XLA_FLAGS` names that flag. Other platforms ignore the flag.
    """
    import jax
    from jax._src import xla_bridge  # the only way to ask without starting the backend

    if FLAG not in os.environ.get("XLA_FLAGS", ""):
        if not xla_bridge.backends_are_initialized():
            flags = os.environ.get("XLA_FLAGS", "")
            os.environ["XLA_FLAGS"] = f"{flags} --{FLAG}=false".strip()
        elif jax.default_backend() == "cpu":
            warnings.warn(
                "JAX computed something before marl could set up its CPU backend; training may "
                f"hang. Set XLA_FLAGS=--{FLAG}=false, or use marl before the first JAX computation",
                stacklevel=2,
            )
    _enable_compilation_cache()


def compiler_options() -> dict[str, Any]:
    """What every program of this library is compiled with.

    On CPU XLA's newer emitters take most of compile time and memory: MLIR is lowered anew for each
    of hundreds of fused kernels. The kernels of the legacy emitters are as fast here, and LLVM's
    second level of optimisation, which takes half the time, makes them as fast as its third.
    """
    import jax

    if jax.default_backend() != "cpu":
        return {}
    wanted = {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 2}
    return {name: value for name, value in wanted.items() if _is_known(name, value)}


@lru_cache
def _is_known(name: str, value: Any) -> bool:
    """Whether XLA has the option: jaxlib 0.11.1 dropped the legacy emitters."""
    import jax

    try:
        jax.jit(lambda: jax.numpy.zeros(())).lower().compile({name: value})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True


def _enable_compilation_cache() -> None:
    """Keep compiled programs between processes, unless JAX has been given a place for them."""
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(
            f"compiled programs are not kept: {directory}: {error.strerror}; "
            "set JAX_COMPILATION_CACHE_DIR to a folder that can be written",
            stacklevel=3,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def cache_directory() -> Path:
    """The user's cache folder, then one folder per jaxlib version and kind of processor.

    A program compiled for one processor can fault on another with fewer instructions, and home
    folders are shared between machines.
    """
    from importlib.metadata import version

    processor = hashlib.sha256(_processor().encode()).hexdigest()[:12]
    return _user_cache() / "marl" / f"jaxlib-{version('jaxlib')}-{processor}"


def _user_cache() -> Path:
    if "XDG_CACHE_HOME" in os.environ:
        return Path(os.environ["XDG_CACHE_HOME"])
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")


def _processor() -> str:
    """Everything that tells apart which instructions this processor has."""
    described = f"{platform.system()} {platform.machine()} {platform.processor()}"
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return described
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(("flags", "Features")):
            return f"{described} {' '.join(sorted(line.partition(':')[2].split()))}"
    return described
