"""Errors that a user can fix: one line with the value, the problem and the fix.

Any other exception is a bug of the program and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path


class UserError(Exception):
    """The cause is in the input, the machine or the run, not in the program.

    label: start of the line that the command line prints. exit_code: 2, the input is invalid and
    the run can't start; 1, the run failed and can resume from its newest checkpoint.
    """

    label = "error"
    exit_code = 1


def report(error: UserError) -> int:
    """Print the line of an error on stderr; returns the exit code."""
    print(printable(f"{error.label}: {error}"), file=sys.stderr, flush=True)
    return error.exit_code


# Of the Cf characters those that reorder text; the others join letters and emojis
_REORDERING = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str) -> str:
    """One line for a terminal, with escapes in place of control characters.

    The message of a server or a verifier and the name of a model or a file could otherwise move the
    cursor, hide lines or set the window's title.
    """
    if text.isprintable():
        return text
    return "".join(_escape(character) for character in text)


def _escape(character: str) -> str:
    if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in _REORDERING:
        return character.encode("unicode_escape").decode()
    return character


class InputError(UserError, ValueError):
    """Invalid config, data, model or verifier."""

    exit_code = 2


class ModelError(InputError):
    """A Hugging Face model directory that can't be used; one line naming the file, key or
    tensor.
    """


class MissingPackageError(UserError, ImportError):
    """An optional package that is not installed; one line that names what needs it and how to
    install it.
    """

    exit_code = 2


class RunError(UserError, RuntimeError):
    """A run that can't continue."""


class EngineError(RunError):
    """A rollout engine that fails or breaks its protocol; one line that names prompt, sample
    and field.
    """


class SharedEngineError(EngineError):
    """An `EngineError` that every rank raises at the same point, so that the ranks can still
    save a checkpoint.
    """


class DiskError(RunError):
    """A file of the run that can't be written.

    The message has the path, the reason and the free space.
    """


@contextlib.contextmanager
def writing(path: str | Path, *, needed: int | None = None) -> Iterator[None]:
    """Turn an `OSError` from writing `path` into a `DiskError`. needed: bytes, if known."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise DiskError(describe_disk(path, error, needed=needed)) from error


def describe_disk(path: str | Path, error: OSError, *, needed: int | None = None) -> str:
    """One line: the error's file, otherwise `path`; the system's reason, bytes needed and free;
    the fix.
    """
    path = error.filename or path
    reason = (error.strerror or str(error) or type(error).__name__).lower()
    room = "" if needed is None else f"{show_bytes(needed)} needed, "
    room += f"{show_bytes(shutil.disk_usage(existing_part(path)).free)} free"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = "free some space"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        fix = "make it writable or choose another run_dir"
    elif error.errno == errno.EFBIG:
        fix = "raise the limit on file sizes (ulimit -f)"
    elif error.errno in (errno.ENOENT, errno.ENOTDIR):
        fix = "don't remove a run's directory while it runs"
    else:
        fix = "check the disk or choose another run_dir"
    return f"{path}: cannot be written: {reason} ({room}); {fix}"


def show_bytes(count: float) -> str:
    """A number of bytes with a unit: `1.5 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def first_line(error: BaseException | str) -> str:
    """The first line of a message that is not blank, or the error's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def existing_part(path: str | Path) -> Path:
    """The deepest part of a path that exists."""
    existing = Path(os.path.abspath(path))
    while not existing.exists():
        existing = existing.parent
    return existing


def describe_value(value: object) -> str:
    """A value's type, with dtype and dimensions for an array."""
    if hasattr(value, "ndim") and hasattr(value, "dtype"):
        return f"a {value.ndim}-d {value.dtype} array"
    return type(value).__name__
