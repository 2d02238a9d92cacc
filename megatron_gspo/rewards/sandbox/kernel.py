"""System calls that Python 3.10 does not wrap, users and limits.

Imported by the launcher: standard library only.
"""

from __future__ import annotations

import ctypes
import os
import resource

from megatron_gspo.rewards.sandbox.command import Limits

CLONE_NEWNS = 0x20000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
MS_NOSUID = 2
MS_NODEV = 4
MS_REC = 16384
MS_PRIVATE = 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_STACK_BYTES = 64 * 2**20
_OPEN_FILES = 64
_FIRST_USER = 0x60000000
_MAX_PROCESSES = 2**22
_SHARED_USERS = 1000

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process to new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, file_system: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    encoded = file_system.encode() if file_system is not None else None
    result = _libc.mount(
        source.encode(), target.encode(), encoded, ctypes.c_ulong(flags), options.encode()
    )
    _check(result, f"mount {target}")


def unmount(target: str) -> None:
    """Detach a mount with all below it."""
    _check(_libc.umount2(target.encode(), _MNT_DETACH), f"umount {target}")


def map_user_to_root(uid: int, gid: int) -> None:
    """In a new user namespace this process's user becomes its root."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def signal_at_death_of_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent dies.

    Lost when the user id changes.
    """
    _check(_libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl")


def make_dumpable() -> None:
    """The files of this process in /proc are its own again, after a change of the user."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def become(uid: int) -> None:
    """Change to a user and group without other groups. Drops the capabilities of root."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def spare_user(number: int) -> int | None:
    """A user id that nobody else has; None if this user namespace maps no id that could be one.

    number: of the process that needs it. Few ids of a small map are shared by processes.
    """
    with open("/proc/self/uid_map") as file:
        first, _, count = max(map(_integers, file), key=lambda row: row[2])
    if first + count > _FIRST_USER + _MAX_PROCESSES:
        return _FIRST_USER + number
    if count <= 2 * _SHARED_USERS:
        return None
    return first + count - 1 - number % _SHARED_USERS


def _integers(line: str) -> tuple[int, int, int]:
    first, outside, count = map(int, line.split())
    return first, outside, count


def resource_limits(limits: Limits) -> dict[str, tuple[int, int]]:
    """Soft and hard limit of each resource, by the names of prlimit(1), within what this process
    may set.

    The kernel's limit of CPU time has whole seconds and is per process.
    """
    seconds = int(limits.cpu_seconds) + 1
    wanted = {
        "cpu": (seconds, seconds + 1),
        "as": (limits.memory_bytes, limits.memory_bytes),
        "fsize": (limits.disk_bytes, limits.disk_bytes),
        "stack": (_STACK_BYTES, _STACK_BYTES),
        "nofile": (_OPEN_FILES, _OPEN_FILES),
        "core": (0, 0),
        "msgqueue": (0, 0),
    }
    for name, (soft, hard) in wanted.items():
        allowed = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
        hard = hard if allowed == resource.RLIM_INFINITY else min(hard, allowed)
        wanted[name] = (min(soft, hard), hard)
    return wanted
