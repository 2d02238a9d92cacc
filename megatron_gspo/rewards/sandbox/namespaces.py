"""Confines a program with the kernel's namespaces, where bubblewrap is missing. Imported by the launcher: standard
library only."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import NoReturn

from megatron_gspo.rewards.sandbox import kernel
from megatron_gspo.rewards.sandbox.bubblewrap import DEVICES
from megatron_gspo.rewards.sandbox.command import BOX, Command, Setup

_NEW = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
_BASE, _OLD = "/tmp", "/.host"  # where the new root is mounted first; where the host's root is, until it is detached
_INODES = 4096


def run_confined(setup: Setup, command: Command, uid: int | None, execute: Callable[[], NoReturn]) -> NoReturn:
    """Enter new namespaces, run `execute` in a child of their first process, and exit as it does.

    uid: the program's user, if this process is root. None: this process's user, in a user namespace.
    execute: limits and replaces the process.
    """
    own, group = os.getuid(), os.getgid()
    new = _NEW if setup.mechanism.shares_network else _NEW | kernel.CLONE_NEWNET
    kernel.unshare(new if uid is not None else new | kernel.CLONE_NEWUSER)
    if uid is None:
        kernel.set_dumpable(True)  # a change of the user unset it, and the files of the maps would be root's
        _map_user(own, group)
    first = os.fork()
    if first:
        os._exit(_status_of(first))
    kernel.signal_at_death_of_parent(signal.SIGKILL)
    _enter_file_system(setup, command, own if uid is None else uid)
    child = os.fork()
    if not child:
        if uid is not None:
            kernel.become(uid)
        kernel.drop_capabilities()
        kernel.limit_processes(command.limits.processes)
        execute()
    kernel.set_dumpable(False)
    os.closerange(0, 1024)
    os._exit(_status_of(child))


def _status_of(child: int) -> int:
    """Reap children until that one ends; its exit status, 128 + signal where a signal ended it."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _map_user(uid: int, gid: int) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _enter_file_system(setup: Setup, command: Command, uid: int) -> None:
    """A root of its own: what is readable, four devices and the program's directory, in memory."""
    os.umask(0o022)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    options = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", _BASE, "tmpfs", options, "mode=755,size=1m")
    os.mkdir(_BASE + _OLD)
    kernel.pivot_root(_BASE, _BASE + _OLD)
    os.chdir("/")
    for path in setup.readable:
        if os.path.islink(_OLD + path) and os.path.dirname(path) == "/":
            os.symlink(os.readlink(_OLD + path), path)
            continue
        _make_target(path, directory=os.path.isdir(_OLD + path))
        kernel.bind_read_only(_OLD + path, path)
    for path in DEVICES:
        _make_target(path, directory=False)
        kernel.mount(_OLD + path, path, None, kernel.MS_BIND)
    os.mkdir(BOX)
    own = f"mode=700,uid={uid},size={command.limits.disk_bytes},nr_inodes={_INODES}"
    kernel.mount("tmpfs", BOX, "tmpfs", options, own)
    os.symlink(BOX[1:], "/tmp")
    for name, content in command.files.items():
        with open(f"{BOX}/{name}", "wb") as file:
            file.write(content)
        os.chmod(f"{BOX}/{name}", 0o555)
    kernel.unmount(_OLD)
    os.rmdir(_OLD)
    kernel.mount("none", "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | options)
    os.chdir(BOX)


def _make_target(path: str, *, directory: bool) -> None:
    os.makedirs(path if directory else os.path.dirname(path), exist_ok=True)
    if not directory:
        with open(path, "w"):
            pass
