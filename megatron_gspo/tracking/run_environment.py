"""The environment of a run: versions, host, git revision."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import megatron_gspo
from megatron_gspo import PROGRAM

PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine", "numpy")


def describe_environment(*, world_size: int) -> dict[str, Any]:
    """Plain data for config.yaml. Imports no large package and does not use the network."""
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "world_size": world_size,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "megatron_gspo": megatron_gspo.__version__,
        "git_revision": git_revision(Path(megatron_gspo.__file__).parent.parent),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def program() -> str:
    """How this environment's ``megatron-gspo`` is called from the working directory: by its name
    where the shell finds it, else by its path."""
    script = Path(sys.executable).with_name(PROGRAM)
    if not script.is_file():
        return f"{sys.executable} -m megatron_gspo"
    on_path = shutil.which(script.name)
    if on_path is not None and Path(on_path).resolve() == script.resolve():
        return script.name
    return os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)


def git_revision(folder: Path) -> str | None:
    """Commit of the checkout whose root is folder, "+changes" where tracked files differ from it;
    else None.

    For a package installed inside another checkout it is None.
    """
    if not (folder / ".git").exists():
        return None
    try:
        revision = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return revision + ("+changes" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    # without locks: a run killed meanwhile would leave one in the checkout, and git would fail
    # there
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
