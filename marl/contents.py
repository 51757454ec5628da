"""What the checkpoints of a run hold: its whole state, or all but the replay buffer; how large."""

from typing import Any

from marl import checkpoint
from marl.replay import Replay


def of(state: Any, keep_replay: bool) -> tuple[Any, dict[str, int]]:
    """What a checkpoint takes of a `RunState`, and the fields that it leaves out, with bytes."""
    size = checkpoint.num_bytes(state).get("replay", 0)
    if keep_replay or not size:
        return state, {}
    return state._replace(replay=()), {"replay": size}


def summary(kept: Any, left_out: dict[str, int]) -> dict[str, Any]:
    """Of a checkpoint, for `summary.json`."""
    sizes = checkpoint.num_bytes(kept)
    total = {"total": sum(sizes.values()), "replay": sizes.get("replay", 0)}
    return {"checkpoint_bytes": total, "resume_is_exact": not left_out}


def note(state: Any, keep_replay: bool) -> str | None:
    """What a user should know before checkpoints are written; None without a replay buffer."""
    sizes = checkpoint.num_bytes(state)
    total, buffer = sum(sizes.values()), sizes.get("replay", 0)
    if not buffer:
        return None
    if keep_replay:
        return (
            f"a checkpoint holds {size(total)}, {size(buffer)} of it the replay buffer; "
            "checkpoint.replay=false leaves that out"
        )
    return (
        f"a checkpoint holds {size(total - buffer)}, without the replay buffer ({size(buffer)}): "
        "resuming will not be exact"
    )


def not_exact(left_out: dict[str, int], sizes: Replay, num_envs: int) -> str:
    """What a user should know who goes on from a checkpoint without a replay buffer."""
    return (
        f"resuming is not exact: the replay buffer ({size(left_out['replay'])}) was left out of "
        "the checkpoint. It starts empty, and learning from it goes on once it holds "
        f"{sizes.least(num_envs):,} transitions"
    )


def size(num_bytes: int) -> str:
    """`64 B`, `8.2 kB`, `412 MB`, `1.5 GB`."""
    number, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if number < 999.5:
            break
        number, unit = number / 1000, larger
    return f"{number:.0f} {unit}" if number >= 9.95 or unit == "B" else f"{number:.1f} {unit}"
