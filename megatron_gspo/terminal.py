"""What the program prints: its lines on standard error and in a rank's log file, and output that
outlives its reader.

A run goes on without its terminal, its pipe's reader or room on its disk.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from megatron_gspo.errors import UserError, printable

_PACKAGE = "megatron_gspo"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module of this package.

    From the first call on, the package's records are lines on standard error, and nowhere else. A
    program that wants them elsewhere replaces the handlers of the logger "megatron_gspo".
    """
    package = logging.getLogger(_PACKAGE)
    if not package.handlers:
        package.addHandler(TerminalHandler())
        package.setLevel(logging.INFO)
        package.propagate = False
    return logging.getLogger(name)


def log_to(handler: logging.Handler) -> None:
    """From now on the package's records go to this handler, and not to standard error."""
    package = get_logger(_PACKAGE)
    package.handlers = [handler]


class TerminalHandler(logging.Handler):
    """Writes each record's message as one line on standard error, without control characters; that
    of a warning begins with `warning: `.

    The stream is looked up for each record: a progress bar and tests replace it.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line, or drop it where standard error is closed or its disk is full."""
        prefix = "warning: " if record.levelno == logging.WARNING else ""
        with contextlib.suppress(OSError, ValueError):
            print(printable(prefix + record.getMessage()), file=sys.stderr, flush=True)


@contextlib.contextmanager
def logged_to(file: Path, level: str, **facts: object) -> Iterator[None]:
    """Within the context the package's records of this level and above are also lines of JSON at the
    end of a file; lower ones are nowhere. The error that ends the context is a line of the file alone,
    with its traceback unless the user can fix it.

    level: such as ``info``. facts: in every line, such as the rank.

    Raises OSError where the file can't be opened.
    """
    package = get_logger(_PACKAGE)
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = _JsonLinesHandler(file, encoding="utf-8")
    handler.setFormatter(_JsonFormatter(facts))
    before = package.level
    package.addHandler(handler)
    package.setLevel(level.upper())
    try:
        yield
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        trace = None if isinstance(error, UserError) else (type(error), error, error.__traceback__)
        handler.handle(package.makeRecord(_PACKAGE, logging.ERROR, "", 0, text, (), trace))
        raise
    finally:
        package.setLevel(before)
        package.removeHandler(handler)
        handler.close()


class _JsonLinesHandler(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's
        """A line that can't be written, as on a full disk, is dropped."""

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it tries once more to write them
            super().close()


class _JsonFormatter(logging.Formatter):
    def __init__(self, facts: Mapping[str, object]) -> None:
        super().__init__()
        self._facts = facts

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._facts,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def outlive_terminal() -> None:
    """From now on no line that this process prints can end it, and neither can its terminal when it
    hangs up.

    Standard output and error become streams that drop what can't be written: the reader of a pipe
    has ended (`| head`), the terminal is gone, the disk of a log file is full. Python would raise,
    at the latest when it flushes them at its end. Streams that someone has replaced, as tests do,
    stay as they are. Safe to call twice.
    """
    _open_missing_descriptors()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _lasting(name, stream))
    # Inherited by worker processes, unlike a handler.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _open_missing_descriptors() -> None:
    """Open the null device as each standard descriptor that is closed (`>&-`); else the next file
    would get its number, and with it whatever a library prints."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)


def _lasting(name: str, stream: TextIO | None) -> TextIO:
    """The stream as one whose writes don't fail; None is one that was closed at the start."""
    descriptor = {"stdout": 1, "stderr": 2}[name]
    settings: dict[str, Any] = {
        "encoding": "utf-8",
        "errors": "backslashreplace",
        "line_buffering": True,
    }
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
        with contextlib.suppress(OSError, ValueError, AttributeError):
            descriptor = stream.fileno()
        for setting in ("encoding", "errors", "line_buffering", "write_through"):
            settings[setting] = getattr(stream, setting, settings.get(setting))
    raw = _LastingFile(descriptor, "wb", closefd=False)
    is_unbuffered = settings.get("write_through", False)  # by PYTHONUNBUFFERED
    return io.TextIOWrapper(raw if is_unbuffered else io.BufferedWriter(raw), **settings)


class _LastingFile(io.FileIO):
    """A descriptor to which writing succeeds: what it does not take is dropped."""

    def write(self, data: Any, /) -> int:
        try:
            # None: another program made the descriptor non-blocking.
            while (count := super().write(data)) is None:
                select.select([], [self.fileno()], [])
            return count
        except (OSError, ValueError):
            return memoryview(data).nbytes
