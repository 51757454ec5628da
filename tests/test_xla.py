"""What is set up before XLA starts; each case in a process of its own, as XLA starts once."""

import os
import subprocess
import sys

import jax
import pytest

from marl import xla

FLAG = f"--{xla.FLAG}"


def python(code, tmp_path, **environment):
    """(stdout lines, stderr) of `code` in a fresh process."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("XLA", "JAX"))
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


SHOW = "import os; print(os.environ['XLA_FLAGS'])"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, f"{FLAG}=false"),
        ("--xla_cpu_enable_fast_math=false", f"--xla_cpu_enable_fast_math=false {FLAG}=false"),
        (f"{FLAG}=true", f"{FLAG}=true"),
    ],
)
def test_the_flag_is_added_unless_it_is_named(tmp_path, given, expected):
    code = f"from marl import xla; xla.prepare(); xla.prepare(); {SHOW}; import jax; jax.devices()"
    environment = {} if given is None else {"XLA_FLAGS": given}
    stdout, stderr = python(code, tmp_path, **environment)
    assert stdout == [expected]
    assert "Warning" not in stderr


@pytest.mark.parametrize(("flags", "warned"), [("", True), (f"{FLAG}=false", False)])
def test_a_backend_that_runs_already_is_told(tmp_path, flags, warned):
    code = "import jax; jax.devices(); from marl import xla; xla.prepare()"
    _, stderr = python(code, tmp_path, XLA_FLAGS=flags)
    assert ("JAX computed something before" in stderr) == warned


CACHE = """
from marl import xla; xla.prepare()
import jax; print(jax.config.jax_compilation_cache_dir)
print(jax.config.jax_persistent_cache_min_compile_time_secs)
"""


def test_compiled_programs_are_kept_in_the_users_cache(tmp_path):
    (directory, least), _ = python(CACHE, tmp_path)
    assert directory.startswith(str(tmp_path / "marl" / "jaxlib-"))
    assert os.path.isdir(directory)
    assert float(least) == 0.5


def test_a_cache_that_the_user_configured_stays(tmp_path):
    stdout, _ = python(CACHE, tmp_path, JAX_COMPILATION_CACHE_DIR="/elsewhere")
    assert stdout[0] == "/elsewhere"
    code = "import jax; jax.config.update('jax_compilation_cache_dir', '/mine')" + CACHE
    stdout, _ = python(code, tmp_path)
    assert stdout[0] == "/mine"


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "marl").write_text("a file where the folder should be")
    stdout, stderr = python(CACHE, tmp_path)
    assert stdout[0] == "None"
    assert "compiled programs are not kept" in stderr


def test_a_second_process_reads_what_the_first_compiled(tmp_path):
    code = """
from marl import xla; xla.prepare()
import jax, jax.numpy as jnp
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
jax.jit(lambda x: jnp.tanh(x @ x).sum())(jnp.ones((8, 8))).block_until_ready()
print("/jax/compilation_cache/cache_hits" in hits)
"""
    assert python(code, tmp_path)[0] == ["False"]
    assert python(code, tmp_path)[0] == ["True"]


def test_the_cache_is_apart_for_another_processor(monkeypatch):
    here = xla.cache_directory()
    assert here == xla.cache_directory()
    monkeypatch.setattr(xla, "_processor", lambda: "another")
    assert xla.cache_directory() != here


def test_options_that_this_xla_does_not_know_are_left_out():
    """Compiling with one ends in an error; its values are still checked."""
    assert not xla._is_known("xla_no_such_option", True)
    assert xla._is_known("xla_backend_optimization_level", 2)
    with pytest.raises(jax.errors.JaxRuntimeError):
        xla._is_known("xla_backend_optimization_level", "two")
    jax.jit(lambda: 1 + 1, compiler_options=xla.compiler_options())()
