"""Command lines of programs, confined and not. Imported by the launcher: standard library only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import PurePosixPath

from megatron_gspo.rewards.sandbox import kernel
from megatron_gspo.rewards.sandbox.command import BOX, Command, Limits

_NAMESPACES = ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
_SETPRIV = "/usr/bin/setpriv"
_PRLIMIT = "/usr/bin/prlimit"
_NO_CAPABILITIES = ("--bounding-set=-all", "--inh-caps=-all")
_USER = "1000"  # what the program sees of its user in a user namespace
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_STREAMS = ("stdin", "stdout", "stderr")


def root_arguments(readable: Sequence[str]) -> list[str]:
    """bubblewrap's arguments for the file system of all programs, to be followed by its remounts.

    readable: paths of the machine that are there, read-only. Links such as /lib stay links.
    """
    arguments = ["--symlink", BOX[1:], "/tmp"]
    parents = {parent for path in readable for parent in PurePosixPath(path).parents}
    for parent in sorted(parents):  # else they are for root alone
        arguments += ["--dir", str(parent)]
    for path in readable:
        if os.path.islink(path) and os.path.dirname(path) == "/":
            arguments += ["--symlink", os.readlink(path), path]
        else:
            arguments += ["--ro-bind", path, path]
    arguments += ["--tmpfs", "/dev"]
    for path in _DEVICES:
        arguments += ["--dev-bind", path, path]
    for number, name in enumerate(_STREAMS):
        arguments += ["--symlink", f"fd/{number}", f"/dev/{name}"]
    return arguments


def bubblewrap_line(
    bubblewrap: str,
    command: Command,
    root: Sequence[str],
    folder: str,
    *,
    status: int,
    seccomp: int | None,
    uid: int | None,
) -> list[str]:
    """The command line of a confined program.

    The limits are set inside, by prlimit: that of processes counts those of the namespace alone
    there.

    Args:
        bubblewrap: the executable.
        root: see `root_arguments`.
        folder: has the program's directory `box` and `fd` with its streams.
        status: descriptor for bubblewrap's report.
        seccomp: descriptor of the filter.
        uid: user of the program, if root sets the sandbox up. None: that of a user namespace.
    """
    line = [bubblewrap, *_NAMESPACES, "--die-with-parent", "--new-session", "--clearenv"]
    line += [*root, "--bind", f"{folder}/fd", "/dev/fd", "--bind", f"{folder}/box", BOX]
    line += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", BOX]
    line += ["--json-status-fd", str(status)]
    for name, value in command.environment.items():
        line += ["--setenv", name, value]
    if seccomp is not None:
        line += ["--seccomp", str(seccomp)]
    if uid is None:
        line += ["--unshare-user", "--uid", _USER, "--gid", _USER, "--"]
    else:
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
            line += ["--cap-add", capability]
        line += ["--", _SETPRIV, *_as_user(uid), *_NO_CAPABILITIES, "--no-new-privs", "--"]
    return [*line, *_prlimit(command.limits, command.limits.processes), *command.argv]


def limits_line(command: Command, *, processes: int, root: bool, uid: int | None) -> list[str]:
    """The command line of a program that is limited and not confined.

    Args:
        processes: the limit, with those that the program's user has already.
        root: whether this process is root's.
        uid: user of the program; None for the same user.
    """
    line = [_SETPRIV, "--no-new-privs", "--pdeathsig", "KILL"]
    if root:
        line += _NO_CAPABILITIES
    if uid is not None:
        line += _as_user(uid)
    return [*line, "--", *_prlimit(command.limits, processes), *command.argv]


def _as_user(uid: int) -> list[str]:
    return ["--reuid", str(uid), "--regid", str(uid), "--clear-groups"]


def _prlimit(limits: Limits, processes: int) -> list[str]:
    pairs = kernel.resource_limits(limits).items()
    return [
        _PRLIMIT,
        f"--nproc={processes}",
        *(f"--{name}={soft}:{hard}" for name, (soft, hard) in pairs),
        "--",
    ]
