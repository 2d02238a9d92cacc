"""The process that starts sandboxes, one program at a time.

It runs in the bare interpreter with an empty environment, so that it has nothing to leak, in a mount and a network
namespace of its own. It ends what it started when its worker dies, and counts the CPU time of all that a program
leaves. It never sees an expected output.

It receives a `Setup`, then `Command`s; each is answered by an `Outcome` or, if the sandbox failed, by the reason as
text.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import NoReturn

from megatron_gspo.rewards.sandbox import kernel
from megatron_gspo.rewards.sandbox.bubblewrap import STREAMS, bubblewrap_line, limits_line
from megatron_gspo.rewards.sandbox.command import Command, Ending, Limits, Outcome, Setup

_STDERR_BYTES = 4096
_KILLED = 128 + signal.SIGKILL
_INODES = 4096  # files and directories of a program


def main(arguments: list[str]) -> None:
    """Serve commands until the other side closes its pipe or dies, or this process gets SIGTERM.

    arguments: descriptors to read from and to write to, process id of the other side.
    """
    reader, writer, parent = map(int, arguments)
    for descriptor in (reader, writer):
        os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGTERM, _exit)
    kernel.signal_at_death_of_parent(signal.SIGTERM)
    kernel.adopt_orphans()
    try:
        if os.getppid() == parent:  # else it died before
            _serve(Connection(reader, writable=False), Connection(writer, readable=False), parent)
    finally:
        # A sandbox that is being set up does not yet die with this process.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_children()


def _exit(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _serve(reader: Connection, writer: Connection, parent: int) -> None:
    """Until the other side closes its pipe."""
    try:
        setup: Setup = reader.recv()
        launcher: _Launcher | None = None
        while True:
            command: Command = reader.recv()
            try:
                launcher = launcher or _Launcher(setup, parent)
                answer: Outcome | str = launcher.run(command)
            except OSError as error:  # not permitted, or no process, descriptor or memory is left
                answer = f"{type(error).__name__}: {error}"
            writer.send(answer)
    except (EOFError, BrokenPipeError):
        return


class _Launcher:
    """Runs programs as the setup says."""

    def __init__(self, setup: Setup, parent: int) -> None:
        """Enters the namespaces. Raises OSError if this process may not."""
        self._setup = setup
        self._confined = setup.mechanism.name == "bubblewrap"
        self._root = os.geteuid() == 0
        # The user that programs run as, in the namespace of this process; None: this process's, or one that bubblewrap
        # makes.
        self._uid = kernel.spare_user(os.getpid()) if self._root else None
        if self._confined:
            self._enter_namespaces(parent)
        elif setup.mechanism.privileged:
            self._uid = None
        self._filter: int | None = None
        if setup.system_call_filter is not None:
            self._filter = os.memfd_create("filter")
            os.write(self._filter, setup.system_call_filter)

    def _enter_namespaces(self, parent: int) -> None:
        """The programs share the empty network, which is slow to make; the mounts are private to this process."""
        if self._setup.mechanism.privileged:
            kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET)
        else:
            if self._uid is not None:
                kernel.become(self._uid)
                self._uid = None
            uid = os.getuid()
            gid = os.getgid()
            kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWNET)
            kernel.make_dumpable()
            kernel.map_user_to_root(uid, gid)
            kernel.signal_at_death_of_parent(signal.SIGTERM)  # a change of the user clears it
            if os.getppid() != parent:
                raise SystemExit
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)

    def run(self, command: Command) -> Outcome | str:
        """Run a program and kill what is left of it; the reason as text if the sandbox could not be set up."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True))
            self._fill(folder, command, stack)
            stdin, stdout, stderr = (
                stack.enter_context(open(f"{folder}/{name}", "rb" if name == "stdin" else "r+b")) for name in STREAMS
            )
            report, writer = os.pipe()
            stack.callback(os.close, report)
            start = time.monotonic()
            inherited = [writer] if self._confined else []
            if self._confined and self._filter is not None:
                inherited.append(self._filter)
            try:
                process = subprocess.Popen(
                    self._line(command, folder, writer),
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    env={} if self._confined else dict(command.environment),
                    cwd="/" if self._confined else f"{folder}/box",
                    pass_fds=inherited,
                    start_new_session=True,
                    umask=0o022,
                )
            finally:
                os.close(writer)
            process.returncode = 0  # it is reaped in `_end`
            in_time = _wait(process.pid, start + command.limits.wall_seconds)
            code, cpu_seconds = _end(process.pid)
            wall_seconds = time.monotonic() - start
            errors = os.pread(stderr.fileno(), _STDERR_BYTES, 0)
            # bubblewrap reports the exit code if and only if it had finished its set-up.
            if self._confined and in_time and b'"exit-code"' not in os.read(report, 65536):
                return errors.decode(errors="replace").strip() or "bubblewrap ended during its set-up"
            size = os.fstat(stdout.fileno()).st_size
            kept = os.pread(stdout.fileno(), min(size, command.limits.output_bytes), 0)
            ending = _ending(command.limits, size=size, cpu_seconds=cpu_seconds, code=code, in_time=in_time)
            return Outcome(ending, code if in_time else _KILLED, kept, errors, cpu_seconds, wall_seconds)

    def _fill(self, folder: str, command: Command, stack: contextlib.ExitStack) -> None:
        """The program's directory and the files of its streams; in memory where the program is confined."""
        box = f"{folder}/box"
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        if self._confined:
            kernel.mount("tmpfs", folder, "tmpfs", flags)
            stack.callback(kernel.unmount, folder)
        os.chmod(folder, 0o711)
        for name in STREAMS:
            with open(f"{folder}/{name}", "wb") as file:
                file.write(command.stdin if name == "stdin" else b"")
            os.chmod(f"{folder}/{name}", 0o444 if name == "stdin" else 0o666)
        os.mkdir(box)
        if self._confined:
            kernel.mount("tmpfs", box, "tmpfs", flags, f"size={command.limits.disk_bytes},nr_inodes={_INODES}")
        for name, content in command.files.items():
            with open(f"{box}/{name}", "wb") as file:
                file.write(content)
            os.chmod(f"{box}/{name}", 0o555)
        os.chmod(box, 0o700)
        if self._uid is not None:
            os.chown(box, self._uid, self._uid)

    def _line(self, command: Command, folder: str, status: int) -> list[str]:
        if self._confined:
            if self._filter is not None:
                os.lseek(self._filter, 0, os.SEEK_SET)
            return bubblewrap_line(
                self._setup, command, folder, status=status, seccomp=self._filter, uid=self._uid
            )
        others = 0 if self._uid is not None else _threads_of_user()
        return limits_line(command, processes=command.limits.processes + others, root=self._root, uid=self._uid)


def _ending(limits: Limits, *, size: int, cpu_seconds: float, code: int, in_time: bool) -> Ending:
    if size > limits.output_bytes:
        return "output"
    if cpu_seconds > limits.cpu_seconds or code == 128 + signal.SIGXCPU:
        return "cpu_time"
    return "exit" if in_time else "wall_time"


def _wait(pid: int, deadline: float) -> bool:
    """Whether the process ends before the deadline. It is not reaped."""
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(1000 * max(0.0, deadline - time.monotonic())))
    finally:
        os.close(descriptor)


def _end(pid: int) -> tuple[int, float]:
    """Kill and reap a child and all of its descendants; its exit status and the CPU seconds of all."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code, usage.ru_utime + usage.ru_stime + _end_children()


def _end_children() -> float:
    """Kill and reap all children and what they leave; their CPU seconds.

    In a process namespace all die with its first process. Those whose parents die become the launcher's.
    """
    seconds = 0.0
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            for child in _children():
                os.kill(child, signal.SIGKILL)
            _, _, usage = os.wait4(-1, 0)
            seconds += usage.ru_utime + usage.ru_stime
    return seconds


def _children() -> list[int]:
    """Children of this process that have not been reaped."""
    launcher = os.getpid()
    children: list[int] = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == launcher:
                children.append(int(name))
    return children


def _threads_of_user() -> int:
    """Threads of this process's user, which the limit of processes counts."""
    user = os.getuid()
    threads = 0
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            if os.stat(f"/proc/{name}").st_uid == user:
                threads += int(file.read().rpartition(")")[2].split()[17])
    return threads


if __name__ == "__main__":
    main(sys.argv[1:])
