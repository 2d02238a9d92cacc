"""What `data.prompts` and `data.eval_prompts` name: files, folders, globs, and splits of data
sets.
"""

from __future__ import annotations

import glob
from pathlib import Path

_PATTERN = frozenset("*?[")


def matching_paths(written: str | Path) -> list[tuple[Path, str | None]]:
    """(file or folder, split or None) of each match; empty without any.

    A path that exists is itself, also if it has a colon or characters of a glob. Otherwise
    `path:split` names a split, and a glob stands for the files that it matches in alphabetical
    order (`**` for folders of any depth), or for the folders if it matches no file.
    """
    text = str(written)
    if Path(text).exists():
        return [(Path(text), None)]
    path, colon, split = text.rpartition(":")
    if colon and split and Path(path).exists():
        return [(Path(path), split)]
    if _PATTERN.isdisjoint(text):
        return []
    matches = [Path(match) for match in sorted(glob.glob(text, recursive=True))]
    files = [match for match in matches if match.is_file()]
    return [(match, None) for match in files or matches]
