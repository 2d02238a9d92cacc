"""Several hosts on one machine: network namespaces with addresses and host names of their own, on
one switch.

What runs on a host has its network, its host name and its /etc/hosts, and nothing else: the disk is
that of all, as a cluster's shared file system is. For root on Linux, with Debian's iproute2.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Where `ip netns exec` looks for a namespace's own files of /etc.
CONFIGURATION = Path("/etc/netns")


@dataclass(frozen=True)
class Host:
    """A namespace; ``name`` is also the host name, which all hosts of the switch can resolve."""

    name: str
    address: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command that runs ``arguments`` there."""
        named = f'echo {self.name} > /proc/sys/kernel/hostname && exec "$@"'
        return [
            "ip",
            "netns",
            "exec",
            self.name,
            "unshare",
            "--uts",
            "bash",
            "-c",
            named,
            "bash",
            *arguments,
        ]

    def processes(self) -> list[int]:
        return [int(process) for process in ip("netns", "pids", self.name).split()]

    def kill(self) -> int:
        """SIGKILL all that runs there, as a power failure does; returns how many processes that
        were.
        """
        count = 0
        deadline = time.monotonic() + 10
        while running := self.processes():
            assert time.monotonic() < deadline, f"{self.name}: {running} outlive SIGKILL"
            count = max(count, len(running))
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.05)
        return count


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def why_not() -> str:
    """Why there can be no hosts here; "" where there can."""
    if os.geteuid() != 0:
        return "network namespaces are for root"
    for program in ("ip", "unshare", "bash"):
        if shutil.which(program) is None:
            return f"there is no {program} (Debian's iproute2, util-linux)"
    try:
        with hosts(1, prefix=f"try{os.getpid()}"):
            return ""
    except OSError as error:
        return f"network namespaces are not allowed here ({error})"


@contextlib.contextmanager
def hosts(count: int, *, prefix: str = "") -> Iterator[list[Host]]:
    """``count`` hosts on a switch of their own; what runs on them is killed at the end. OSError
    where that can't be.
    """
    remove_those_of_the_dead()
    prefix = prefix or f"gspo{os.getpid()}"
    switch = f"{prefix}-switch"
    machines = [Host(f"{prefix}-{number}", f"10.77.0.{number + 1}") for number in range(count)]
    names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in machines)
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for number, host in enumerate(machines):
            ip("netns", "add", host.name)
            port = f"port{number}"
            ip(
                "-n",
                switch,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                host.name,
            )
            ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", host.name, "link", "set", device, "up")
            _write_names(CONFIGURATION / host.name, names)
        yield machines
    finally:
        _remove(machines, switch)


def _write_names(folder: Path, names: str) -> None:
    for _ in range(3):
        # Another test process has just removed the parent.
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(parents=True)
            break
    (folder / "hosts").write_text(names)


def remove_those_of_the_dead() -> None:
    """Namespaces of a test process that was killed before it could remove them."""
    for name in _existing():
        owner = re.match(r"gspo(\d+)-", name)
        if owner and not Path("/proc", owner[1]).exists():
            with contextlib.suppress(OSError):  # another test process was faster
                _remove([Host(name, "")], "")


def _existing() -> set[str]:
    return {line.split()[0] for line in ip("netns", "list").splitlines() if line}


def _remove(machines: Sequence[Host], switch: str) -> None:
    existing = _existing()
    for host in machines:
        shutil.rmtree(CONFIGURATION / host.name, ignore_errors=True)
        if host.name in existing:
            host.kill()
            ip("netns", "del", host.name)
    if switch in existing:
        ip("netns", "del", switch)
    with contextlib.suppress(OSError):  # it isn't empty, or wasn't made
        CONFIGURATION.rmdir()
