"""Command lines of confined programs. Imported by the launcher: standard library only."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron_gspo.rewards.sandbox import kernel
from megatron_gspo.rewards.sandbox.command import BOX, Command, Limits, Setup

DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
STREAMS = ("stdin", "stdout", "stderr")
_NAMESPACES = ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
_SETPRIV = "/usr/bin/setpriv"
_PRLIMIT = "/usr/bin/prlimit"
_NO_CAPABILITIES = ("--bounding-set=-all", "--inh-caps=-all")
_USER = "1000"  # what the program sees of its user in a user namespace


def bubblewrap_line(
    setup: Setup, command: Command, folder: str, *, status: int, seccomp: int | None, uid: int | None
) -> list[str]:
    """The command line of bubblewrap.

    folder: has the program's directory `box` and the files of its `STREAMS`.
    status: descriptor for bubblewrap's report. seccomp: descriptor of the filter.
    uid: user of the program, if root sets the sandbox up. None: that of a user namespace.

    The limits are set inside, by prlimit: that of processes counts those of the namespace alone there.
    """
    assert setup.bubblewrap is not None
    line = [setup.bubblewrap, *_NAMESPACES, "--die-with-parent", "--new-session", "--clearenv"]
    line += _file_system(setup.readable)
    line += ["--bind", f"{folder}/box", BOX, "--symlink", BOX[1:], "/tmp", "--chdir", BOX]
    line += _streams(folder)
    line += ["--remount-ro", "/", "--json-status-fd", str(status)]
    for name, value in command.environment.items():
        line += ["--setenv", name, value]
    if seccomp is not None:
        line += ["--seccomp", str(seccomp)]
    if uid is None:
        line += ["--unshare-user", "--uid", _USER, "--gid", _USER, "--"]
    else:
        line += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP", "--"]
        line += [_SETPRIV, *_as_user(uid), *_NO_CAPABILITIES, "--no-new-privs", "--"]
    return [*line, *_prlimit(command.limits, command.limits.processes), *command.argv]


def limits_line(command: Command, *, processes: int, root: bool, uid: int | None) -> list[str]:
    """The command line of a program that is limited and not confined.

    processes: the limit, with those that the program's user has already. root: whether this process is root's.
    uid: user of the program; None for the same user.
    """
    line = [_SETPRIV, "--no-new-privs", "--pdeathsig", "KILL"]
    if root:
        line += _NO_CAPABILITIES
    if uid is not None:
        line += _as_user(uid)
    return [*line, "--", *_prlimit(command.limits, processes), *command.argv]


def _file_system(readable: Sequence[str]) -> list[str]:
    """Options that show the readable paths; links of the root directory such as /lib stay links."""
    options: list[str] = []
    for path in readable:
        if os.path.islink(path) and os.path.dirname(path) == "/":
            options += ["--symlink", os.readlink(path), path]
        else:
            parts = path.strip("/").split("/")
            for count in range(1, len(parts)):  # bubblewrap would make the parents for root alone
                options += ["--perms", "0755", "--dir", "/" + "/".join(parts[:count])]
            options += ["--ro-bind", path, path]
    return options


def _streams(folder: str) -> list[str]:
    """Options for /dev: devices, and the streams as files, because there is no /proc that would show them."""
    options = ["--perms", "0755", "--dir", "/dev", "--perms", "0755", "--dir", "/dev/fd"]
    for device in DEVICES:
        options += ["--dev-bind", device, device]
    for number, name in enumerate(STREAMS):
        options += ["--ro-bind" if name == "stdin" else "--bind", f"{folder}/{name}", f"/dev/{name}"]
        options += ["--symlink", f"../{name}", f"/dev/fd/{number}"]
    return options


def _as_user(uid: int) -> list[str]:
    return ["--reuid", str(uid), "--regid", str(uid), "--clear-groups"]


def _prlimit(limits: Limits, processes: int) -> list[str]:
    pairs = kernel.resource_limits(limits).items()
    return [_PRLIMIT, f"--nproc={processes}", *(f"--{name}={soft}:{hard}" for name, (soft, hard) in pairs), "--"]
