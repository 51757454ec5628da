"""Checkpoints: arrays and JSON, never code. Written whole or not at all.

    checkpoints/step_000000200000/arrays.npz       the leaves of a PyTree, named by their key paths
                                  manifest.json    names, shapes, sizes, versions, checksums

A checkpoint is written under a temporary name, forced to the disk and renamed, so that a crash at
any moment leaves the ones before it. Typed PRNG keys are stored as their data and implementation;
dtypes that NumPy does not have (bfloat16, float8, int4) as their bits.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from marl.envs.errors import UsageError

FORMAT = 1
ARRAYS, MANIFEST = "arrays.npz", "manifest.json"
RESERVED = ("format", "step", "versions", "bytes", "leaves", "sha256", "manifest_sha256")
_NAME = re.compile(r"step_(\d+)")


class CorruptCheckpoint(UsageError):  # noqa: N818  (the name that users read)
    """A checkpoint that is torn, damaged or not one at all."""


def save(
    directory: str | Path, step: int, tree: Any, manifest: Mapping[str, Any], keep: int = 3
) -> Path:
    """Write `tree` as the checkpoint of `step` and delete all but the newest `keep`.

    Args:
      directory: holds the checkpoints of one run; made if missing.
      step: environment steps so far; a checkpoint of the same step is replaced.
      tree: a PyTree of arrays, typed keys and numbers.
      manifest: JSON values to keep beside the arrays; `read_manifest` gives them back.

    Raises:
      UsageError: the disk refused; checkpoints written before are untouched.
    """
    reserved = sorted(set(manifest) & set(RESERVED))
    if reserved:
        raise ValueError(f"a manifest cannot have the keys {reserved}: they are written here")
    directory = Path(directory)
    temporary = directory / f".tmp_{step}_{os.getpid()}"
    final = directory / f"step_{step:012d}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(directory)
        _write(temporary, step, tree, manifest)
        _put_in_place(temporary, final)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"could not write a checkpoint to {directory}: {reason}; earlier ones are intact"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _prune(directory, step, keep)
    return final


def latest(directory: str | Path, report: Callable[[str], Any] = warnings.warn) -> Path | None:
    """The newest checkpoint that is whole, or None; damaged ones are passed over with a report."""
    for _, path in reversed(_checkpoints(Path(directory))):
        try:
            _verify(path)
        except CorruptCheckpoint as error:
            report(f"{error}; trying the checkpoint before it")
            continue
        return path
    return None


def read_manifest(path: str | Path) -> dict[str, Any]:
    """What was saved beside the arrays, and: format, step, versions, bytes, leaves, sha256.

    Raises:
      CorruptCheckpoint: there is no readable manifest.
    """
    file = Path(path) / MANIFEST
    try:
        text = file.read_text(encoding="utf-8")
        manifest = json.loads(text)
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(f"checkpoint {path} has no readable manifest: {error}") from None
    if not isinstance(manifest, dict) or _sealed(manifest) != text:
        raise CorruptCheckpoint(f"checkpoint {path} has a damaged manifest: its checksum is wrong")
    if manifest["format"] != FORMAT:
        raise UsageError(
            f"checkpoint {path} has format {manifest['format']}; this version reads {FORMAT}"
        )
    return manifest


def restore(path: str | Path, like: Any, part: Sequence[str] | None = None) -> Any:
    """The tree that was saved, in the structure of `like`.

    Args:
      like: a tree of the same structure, shapes and dtypes; `jax.eval_shape` gives one for free.
      part: fields of `like`, a NamedTuple, to restore; the others stay as they are. None: all.

    Returns:
      JAX arrays and typed keys; NumPy arrays and Python numbers where `like` has them.

    Raises:
      UsageError: the checkpoint is of another structure; the message names the first differences.
      CorruptCheckpoint: it is torn or damaged.
    """
    manifest = _verify(Path(path))
    leaves, structure = _named_leaves(like)
    saved = {entry["name"]: entry for entry in manifest["leaves"]}
    if part is not None:
        wanted = tuple(f".{field}" for field in part)
        saved = {name: entry for name, entry in saved.items() if _field(name) in wanted}
    others = {name for name in leaves if part is not None and _field(name) not in wanted}
    expected = {name: _describe(leaf) for name, leaf in leaves.items() if name not in others}
    differences = _differences(saved, expected)
    if differences:
        shown = "\n  ".join(differences[:6])
        more = f"\n  and {len(differences) - 6} more" if len(differences) > 6 else ""
        raise UsageError(f"checkpoint {path} is of another structure:\n  {shown}{more}")
    with np.load(Path(path) / ARRAYS, allow_pickle=False) as arrays:
        restored = [
            leaf if name in others else _unpack(arrays[_member(name)], saved[name], leaf)
            for name, leaf in leaves.items()
        ]
    return jax.tree.unflatten(structure, restored)


def num_bytes(tree: Any) -> dict[str, int]:
    """Size of the arrays by field of `tree`, a NamedTuple; shapes will do."""
    sizes: dict[str, int] = {}
    for name, leaf in _named_leaves(tree)[0].items():
        leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        field = _field(name).removeprefix(".")
        sizes[field] = sizes.get(field, 0) + leaf.size * leaf.dtype.itemsize
    return sizes


def _write(temporary: Path, step: int, tree: Any, manifest: Mapping[str, Any]) -> None:
    leaves, _ = _named_leaves(tree)
    temporary.mkdir()
    with open(temporary / ARRAYS, "wb") as file:
        arrays: dict[str, Any] = {_member(name): _pack(leaf) for name, leaf in leaves.items()}
        np.savez(file, **arrays)
        _force(file)
    contents = dict(manifest) | {
        "format": FORMAT,
        "step": step,
        "versions": {name: version(name) for name in ("marl", "jax", "numpy")},
        "bytes": num_bytes(tree),
        "leaves": [_entry(name, leaf) for name, leaf in leaves.items()],
        "sha256": _checksum(temporary / ARRAYS),
    }
    with open(temporary / MANIFEST, "w", encoding="utf-8") as file:
        file.write(_sealed(contents))
        _force(file)
    _force_directory(temporary)


def _sealed(contents: Mapping[str, Any]) -> str:
    """The manifest's text, with a checksum of itself."""
    unsealed = {key: value for key, value in contents.items() if key != "manifest_sha256"}
    digest = hashlib.sha256(json.dumps(unsealed, allow_nan=False).encode()).hexdigest()
    return json.dumps(unsealed | {"manifest_sha256": digest}, indent=1, allow_nan=False)


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename; one of that name steps aside first, as folders cannot be replaced at once."""
    aside = final.with_name(f".old_{final.name}")
    replaces = final.exists()
    if replaces:
        final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        if replaces:
            aside.rename(final)
        raise
    _force_directory(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _remove_leftovers(directory: Path) -> None:
    """What a killed run left behind; one that stepped aside and has no successor comes back."""
    for leftover in directory.glob(".old_step_*"):
        final = leftover.with_name(leftover.name.removeprefix(".old_"))
        if not final.exists():
            leftover.rename(final)
    for leftover in [*directory.glob(".tmp_*"), *directory.glob(".old_step_*")]:
        shutil.rmtree(leftover)


def _prune(directory: Path, step: int, keep: int) -> None:
    """Keep the newest up to `step`. Later ones are damaged: the run fell back behind them."""
    older = [path for saved, path in _checkpoints(directory) if saved <= step]
    for path in older[: -max(keep, 1)]:
        shutil.rmtree(path, ignore_errors=True)  # one that cannot go now is tried again next time


def _checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of each, the oldest first."""
    if not directory.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def _verify(path: Path) -> dict[str, Any]:
    manifest = read_manifest(path)
    try:
        checksum = _checksum(path / ARRAYS)
    except OSError as error:
        raise CorruptCheckpoint(f"checkpoint {path} has no readable arrays: {error}") from None
    if checksum != manifest["sha256"]:
        raise CorruptCheckpoint(f"checkpoint {path} is damaged: its checksum does not match")
    return manifest


def _differences(
    saved: Mapping[str, Mapping[str, Any]], expected: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    found = []
    for name in [*expected, *(name for name in saved if name not in expected)]:
        have, want = (_words(leaves.get(name)) for leaves in (saved, expected))
        if have != want:
            found.append(f"{name or 'the array'}: the checkpoint has {have}, expected {want}")
    return found


def _words(leaf: Mapping[str, Any] | None) -> str:
    if leaf is None:
        return "nothing"
    return f"{leaf['dtype']}{list(leaf['shape'])}"


def _named_leaves(tree: Any) -> tuple[dict[str, Any], Any]:
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in paths}
    if len(leaves) != len(paths):
        raise ValueError("two leaves of the tree have the same key path; name them apart")
    return leaves, structure


def _field(name: str) -> str:
    """The first entry of a key path: `.team` of `.team[0].actor`."""
    return re.match(r"[.\[]?[^.\[]*", name)[0]  # type: ignore[index]


def _member(name: str) -> str:
    return f"leaf{name}"  # a tree that is one leaf has an empty path


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)


def _describe(leaf: Any) -> dict[str, Any]:
    """Shape and dtype of a leaf; a typed key's dtype tells its implementation, `key<fry>`."""
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def _entry(name: str, leaf: Any) -> dict[str, Any]:
    implementation = {"key_impl": jax.random.key_impl(leaf)} if _is_key(leaf) else {}
    return {"name": name} | _describe(leaf) | implementation


def _pack(leaf: Any) -> np.ndarray:
    array = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    if array.dtype.hasobject:
        raise ValueError(f"a checkpoint holds arrays and numbers; got {type(leaf).__name__}")
    if array.dtype.isbuiltin == 1:
        return array
    return array.view(np.dtype(f"uint{8 * array.dtype.itemsize}"))


def _unpack(array: np.ndarray, entry: Mapping[str, Any], like: Any) -> Any:
    if "key_impl" in entry:
        return jax.random.wrap_key_data(jax.numpy.array(array), impl=entry["key_impl"])
    array = array.view(jax.numpy.dtype(entry["dtype"]))
    if isinstance(like, np.ndarray | np.generic):
        return array if isinstance(like, np.ndarray) else array[()]
    return jax.numpy.array(array) if hasattr(like, "dtype") else type(like)(array[()])


def _checksum(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _force(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _force_directory(path: Path) -> None:
    if os.name == "nt":  # directories cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
