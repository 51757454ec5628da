"""What the repository promises about its structure: imports, cost of importing, files, wheel."""

import ast
import re
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("agents", "envs", "configs")  # marl/<name> -> ../<name>
FOLDERS = (*LINKED, "marl", "tests", "examples", "benchmarks")
MAX_LINES = 350


def files(folder):
    """The Python files of a top-level folder; what it links to belongs to another one."""
    found = sorted((ROOT / folder).rglob("*.py"))
    links = [path for path in (ROOT / folder).iterdir() if path.is_symlink()]
    return [path for path in found if not any(link in path.parents for link in links)]


def imports(path):
    """Dotted names of everything that a file imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: line {node.lineno} is a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(package):
    """Files of the three packages that import `package`, relative to the repository."""
    return {
        path.relative_to(ROOT).as_posix()
        for folder in ("agents", "envs", "marl")
        for path in files(folder)
        if any(name.split(".")[0] == package for name in imports(path))
    }


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [("envs", ("marl.envs",)), ("agents", ("marl.envs", "marl.agents"))],
)
def test_imports_point_one_way(folder, allowed):
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files(folder)
        for name in imports(path)
        if name.split(".")[0] == "marl" and ".".join(name.split(".")[:2]) not in allowed
    ]
    assert not wrong


@pytest.mark.parametrize("folder", [f for f in FOLDERS if (ROOT / f).is_dir()])
def test_nobody_imports_the_bare_folder_names(folder):
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files(folder)
        for name in imports(path)
        if name.split(".")[0] in LINKED
    ]
    assert not wrong


def test_every_package_has_one_home():
    suites = importers("jaxmarl")
    assert suites
    assert all(re.fullmatch(r"envs/suites/jaxmarl\w*\.py", path) for path in suites)
    assert importers("haiku") == {f"agents/{n}.py" for n in ("cores", "images", "networks")}
    assert importers("omegaconf") | importers("yaml") <= {"marl/config.py", "marl/options.py"}


def test_the_folders_are_linked_into_the_namespace():
    for name in LINKED:
        link = ROOT / "marl" / name
        assert link.is_symlink(), f"{link} is no symbolic link: see Windows in CONTRIBUTING.md"
        assert link.readlink() == Path("..", name)


def test_importing_marl_is_cheap_and_silent():
    code = (
        "import time, jax; start = time.process_time(); import marl; "
        "marl.make, marl.team, marl.train, marl.load; "
        "import sys; print(time.process_time() - start, file=sys.stderr); "
        "heavy = {'jaxmarl', 'brax', 'haiku', 'distrax'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    (seconds,) = done.stderr.splitlines()  # nothing else was written
    assert float(seconds) < 2.0


@pytest.mark.parametrize("folder", [f for f in FOLDERS if (ROOT / f).is_dir()])
def test_files_are_short_enough_to_read(folder):
    long = {
        str(path.relative_to(ROOT)): lines
        for path in files(folder)
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) >= MAX_LINES
    }
    assert not long


BUILD = """
import sys
from setuptools import build_meta
print(build_meta.build_wheel(sys.argv[1]))
"""


@pytest.mark.skipif(
    int(version("setuptools").split(".")[0]) < 77, reason="building needs setuptools >= 77"
)
def test_the_wheel_holds_the_tree_and_no_other_top_level_name(tmp_path):
    tree = copy_of_the_tree(tmp_path / "tree")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    info = {name for name in names if ".dist-info/" in name}
    assert set(names) - info == expected_in_the_wheel()
    assert any(name.endswith("/LICENSE") for name in info)
    assert any(name.endswith("/entry_points.txt") for name in info)


def copy_of_the_tree(target):
    """What building reads, with its links, so that building leaves nothing in the repository."""
    import shutil

    target.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in (*LINKED, "marl"):
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignored)
    return target


def expected_in_the_wheel():
    kept = ("*.py", "*.yaml", "py.typed")
    own = {path.relative_to(ROOT).as_posix() for path in files("marl")} | {"marl/py.typed"}
    linked = {
        f"marl/{path.relative_to(ROOT).as_posix()}"
        for name in LINKED
        for pattern in kept
        for path in (ROOT / name).rglob(pattern)
    }
    return own | linked
