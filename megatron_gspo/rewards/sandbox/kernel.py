"""System calls that Python 3.10 does not wrap. Imported by the launcher: standard library only."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct

from megatron_gspo.rewards.sandbox.command import Limits

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_RDONLY, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 32, 1, 4096, 16384, 1 << 18
MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 36, 38, 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _AT_RECURSIVE, _ATTR_RDONLY_NOSUID_NODEV, _AT_FDCWD = 442, 0x8000, 1 | 2 | 4, -100
_STACK_BYTES, _OPEN_FILES = 64 * 2**20, 64
_FIRST_USER, _MAX_PROCESSES, _SHARED_USERS = 0x60000000, 2**22, 1000

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process (its children, for processes) to new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    arguments = (source.encode(), target.encode(), kind.encode() if kind else None)
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def bind_read_only(source: str, target: str) -> None:
    """Show `source` with all mounts below it at `target`, read-only, without devices and set-user-id programs."""
    mount(source, target, None, MS_BIND | MS_REC)
    attributes = struct.pack("4Q", _ATTR_RDONLY_NOSUID_NODEV, 0, 0, 0)
    path = target.encode()
    result = _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path, _AT_RECURSIVE, attributes, len(attributes))
    _check(result, f"mount_setattr {target}")


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root and move the old root to `old`, below it."""
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(0, f"pivot_root: unknown machine {platform.machine()}")
    _check(_libc.syscall(number, new.encode(), old.encode()), "pivot_root")


def unmount(target: str) -> None:
    """Detach a mount with all below it."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def signal_at_death_of_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent dies. Lost when the user id changes."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl")


def set_dumpable(allowed: bool) -> None:
    """Whether other processes of this user can read and trace this one, and whether its /proc files are its own."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, int(allowed), 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def drop_capabilities() -> None:
    """No program gains a capability by execve any more: set-user-id bits and file capabilities have no effect."""
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


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
    return first + count - 1 - number % _SHARED_USERS if count > 2 * _SHARED_USERS else None


def _integers(line: str) -> tuple[int, int, int]:
    first, outside, count = map(int, line.split())
    return first, outside, count


def filter_system_calls(program: bytes) -> None:
    """Install a seccomp filter: BPF instructions of 8 bytes. Needs no_new_privs."""
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0), "seccomp")


def resource_limits(limits: Limits) -> dict[str, tuple[int, int]]:
    """Soft and hard limit of each resource, by the names of prlimit(1), within what this process may set.

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
        allowed = resource.getrlimit(_resource(name))[1]
        hard = hard if allowed == resource.RLIM_INFINITY else min(hard, allowed)
        wanted[name] = (min(soft, hard), hard)
    return wanted


def set_limits(limits: Limits) -> None:
    """Set all limits of this process but that of processes."""
    for name, pair in resource_limits(limits).items():
        resource.setrlimit(_resource(name), pair)


def limit_processes(count: int) -> None:
    """The number of processes and threads of this user, counted in this user namespace."""
    resource.setrlimit(resource.RLIMIT_NPROC, (count, count))


def _resource(name: str) -> int:
    return getattr(resource, f"RLIMIT_{name.upper()}")
