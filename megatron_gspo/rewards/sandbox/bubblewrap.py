"""Command lines of programs, confined and not. Imported by the launcher: standard library only."""

from __future__ import annotations

from megatron_gspo.rewards.sandbox import kernel
from megatron_gspo.rewards.sandbox.command import BOX, Command, Limits

_NAMESPACES = ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
_SETPRIV = "/usr/bin/setpriv"
_PRLIMIT = "/usr/bin/prlimit"
_NO_CAPABILITIES = ("--bounding-set=-all", "--inh-caps=-all")
_USER = "1000"  # what the program sees of its user in a user namespace


def bubblewrap_line(
    bubblewrap: str,
    command: Command,
    folder: str,
    *,
    status: int,
    seccomp: int | None,
    uid: int | None,
) -> list[str]:
    """The command line of a confined program.

    bubblewrap: the executable. folder: has `root`, which the program sees read-only, its directory
    `box`, and `fd` with its streams. status: descriptor for bubblewrap's report. seccomp:
    descriptor of the filter. uid: user of the program, if root sets the sandbox up. None: that of a
    user namespace.

    The limits are set inside, by prlimit: that of processes counts those of the namespace alone
    there.
    """
    line = [bubblewrap, *_NAMESPACES, "--die-with-parent", "--new-session", "--clearenv"]
    line += ["--ro-bind", f"{folder}/root", "/", "--dev-bind", f"{folder}/root/dev", "/dev"]
    line += ["--bind", f"{folder}/fd", "/dev/fd", "--bind", f"{folder}/box", BOX, "--chdir", BOX]
    line += ["--json-status-fd", str(status)]
    for name, value in command.environment.items():
        line += ["--setenv", name, value]
    if seccomp is not None:
        line += ["--seccomp", str(seccomp)]
    if uid is None:
        line += ["--unshare-user", "--uid", _USER, "--gid", _USER, "--"]
    else:
        line += [
            "--cap-add",
            "CAP_SETUID",
            "--cap-add",
            "CAP_SETGID",
            "--cap-add",
            "CAP_SETPCAP",
            "--",
        ]
        line += [_SETPRIV, *_as_user(uid), *_NO_CAPABILITIES, "--no-new-privs", "--"]
    return [*line, *_prlimit(command.limits, command.limits.processes), *command.argv]


def limits_line(command: Command, *, processes: int, root: bool, uid: int | None) -> list[str]:
    """The command line of a program that is limited and not confined.

    processes: the limit, with those that the program's user has already. root: whether this process
    is root's. uid: user of the program; None for the same user.
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
