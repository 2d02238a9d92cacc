"""Where an operation was called: the frames of the project, of Megatron and of the user's code."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import CodeType

from megatron_gspo.tools.rehearse.records import CallSite

Frames = tuple[tuple[CodeType, int], ...]

_DEPTH = 5
_TOOL = str(Path(__file__).resolve().parent)
_LIBRARY = sysconfig.get_paths()["stdlib"]
_PACKAGES = "/site-packages/"
_SKIPPED_PACKAGES = ("torch/", "typing_extensions.py", "numpy/", "_pytest/", "pluggy/")
_ROOT = str(Path(__file__).resolve().parents[2])
_labels: dict[CodeType, str] = {}  # "" for code that is no call site of its own


def frames_above(level: int = 1, most: int = _DEPTH, end: CodeType | None = None) -> Frames:
    """Code and line of the innermost frames that are call sites, innermost first, up to a frame of
    ``end``; cheaper than `call_site`.
    """
    frame = sys._getframe(level)
    frames: list[tuple[CodeType, int]] = []
    while frame is not None and len(frames) < most:
        code = frame.f_code
        if code is end:
            break
        label = _labels.get(code)
        if label is None:
            label = _labels[code] = _label(code)
        if label:
            frames.append((code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(frames)


def call_site(frames: Frames) -> CallSite:
    """Frames as ``file:line function``."""
    return tuple(f"{_labels[code]}:{line} {code.co_name}" for code, line in frames)


def _label(code: CodeType) -> str:
    """The file of a call site as it is shown; empty for torch's, Python's and this tool's code."""
    name = code.co_filename
    if name.startswith(("<", _TOOL)):
        return ""
    if _PACKAGES in name:
        short = name.split(_PACKAGES, 1)[1]
        return "" if short.startswith(_SKIPPED_PACKAGES) else short
    if name.startswith(_LIBRARY):
        return ""
    return name.removeprefix(_ROOT + "/")
