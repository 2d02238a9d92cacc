"""The command line of bubblewrap. Imported by the launcher: standard library only."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from megatron_gspo.rewards.sandbox import kernel
from megatron_gspo.rewards.sandbox.command import BOX, Command, Setup

DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_NAMESPACES = ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")


def file_system(readable: Sequence[str]) -> list[str]:
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
    for device in DEVICES:
        options += ["--dev-bind", device, device]
    return options


def arguments(
    setup: Setup,
    command: Command,
    descriptors: Mapping[str, int],
    *,
    status: int,
    seccomp: int | None,
    uid: int | None,
) -> list[str]:
    """The command line.

    descriptors: of each file of the command, open at its start. status: descriptor for bubblewrap's report.
    seccomp: descriptor of the filter.
    uid: user of the program, if root sets the sandbox up. None: the same user, in a user namespace.

    The limits are set inside, by prlimit: that of processes counts those of the namespace alone there.
    """
    assert setup.bubblewrap is not None
    options = [setup.bubblewrap, *_NAMESPACES, "--die-with-parent", "--new-session", "--clearenv"]
    if not setup.mechanism.shares_network:
        options += ["--unshare-net"]
    options += file_system(setup.readable)
    options += ["--perms", "1777", "--size", str(command.limits.disk_bytes), "--tmpfs", BOX]
    for name, descriptor in descriptors.items():
        options += ["--perms", "0555", "--file", str(descriptor), f"{BOX}/{name}"]
    options += ["--symlink", BOX[1:], "/tmp", "--chdir", BOX, "--remount-ro", "/", "--json-status-fd", str(status)]
    for name, value in command.environment.items():
        options += ["--setenv", name, value]
    if seccomp is not None:
        options += ["--seccomp", str(seccomp)]
    if uid is None:
        options += ["--unshare-user", "--"]
    else:
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP", "--"]
        options += ["/usr/bin/setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups"]
        options += ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "--"]
    options += ["/usr/bin/prlimit", f"--nproc={command.limits.processes}"]
    options += [f"--{name}={soft}:{hard}" for name, (soft, hard) in kernel.resource_limits(command.limits).items()]
    return [*options, "--", *command.argv]
