"""Which folder of Megatron-LM's or Megatron-Bridge's holds the checkpoint that a user names."""

from __future__ import annotations

from pathlib import Path

from megatron_gspo.errors import ModelError

TRACKER = "latest_checkpointed_iteration.txt"
_METADATA = ".metadata"  # of torch.distributed.checkpoint
_RELEASE = "release"


def iteration_folder(path: str | Path) -> Path:
    """The folder of a distributed checkpoint: ``path`` itself, or the newest one in it.

    Raises ``ModelError`` where there is none.
    """
    folder = Path(path)
    if not (folder / _METADATA).is_file() and (folder / TRACKER).is_file():
        folder = folder / _name_of(folder / TRACKER)
    if (folder / _METADATA).is_file():
        return folder
    if any(folder.glob("mp_rank_*")):
        raise ModelError(
            f"{folder} is in Megatron's format torch, whose pickles could run code; save it again"
            " with --ckpt-format torch_dist"
        )
    problem = "has no .metadata" if folder.is_dir() else "is not a directory"
    raise ModelError(
        f"{folder} {problem}; give the folder of an iteration in Megatron's format torch_dist, or"
        f" the one with {TRACKER}"
    )


def _name_of(tracker: Path) -> str:
    content = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if content == _RELEASE:
        return content
    if not content.isdecimal():
        raise ModelError(
            f"{tracker} holds {content[:20]!r}, no iteration; give the folder of an iteration"
        )
    return f"iter_{int(content):07d}"
