"""The process that starts sandboxes, one program at a time.

It runs in the bare interpreter with an empty environment, so that it has nothing to leak, in a
mount and a network namespace of its own. It ends what it started when its worker dies, and counts
the CPU time of all that a program leaves. It never sees an expected output.

It receives a `Setup`, then `Command`s; each is answered by an `Outcome` or, if the sandbox failed,
by the reason as text.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import BinaryIO, NamedTuple, NoReturn

from megatron_gspo.rewards.sandbox import kernel
from megatron_gspo.rewards.sandbox.bubblewrap import bubblewrap_line, limits_line, root_arguments
from megatron_gspo.rewards.sandbox.command import Command, Ending, Limits, Outcome, Setup

_STDERR_BYTES = 4096
_KILLED = 128 + signal.SIGKILL
_INODES = 4096  # files and directories of a program
_TICKS = os.sysconf("SC_CLK_TCK")
_LOOKS = 20  # at the CPU time that a program has used, before it reaches its limit
_STREAMS = 8  # the same of the file system that has its streams
_IN_MEMORY = kernel.MS_NOSUID | kernel.MS_NODEV


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
        _end_children()


def _exit(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _serve(reader: Connection, writer: Connection, parent: int) -> None:
    """Until the other side closes its pipe."""
    try:
        setup: Setup = reader.recv()
        with contextlib.ExitStack() as stack:
            launcher: _Launcher | None = None
            try:
                while True:
                    command: Command = reader.recv()
                    try:
                        launcher = launcher or _Launcher(setup, parent, stack)
                        answer: Outcome | str = launcher.run(command)
                    except OSError as error:
                        # Not permitted, or no process, descriptor or memory is left.
                        answer = f"{type(error).__name__}: {error}"
                    writer.send(answer)
            finally:
                # The other side closes its pipe and then sends the signal: what follows is not interrupted.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except (EOFError, BrokenPipeError):
        return


class _Launcher:
    """Runs programs as the setup says, in a folder with their directory `box` and their streams
    in `fd`.
    """

    def __init__(self, setup: Setup, parent: int, stack: contextlib.ExitStack) -> None:
        """Prepare to confine programs.

        Args:
            parent: process id of the other side.
            stack: closes what is opened here.

        Raises:
            OSError: this process may not confine programs.
        """
        self._bubblewrap = setup.bubblewrap if setup.mechanism.name == "bubblewrap" else None
        self._root = os.geteuid() == 0
        # The user that programs run as, in the namespace of this process; None: this process's, or
        # one that bubblewrap makes.
        self._uid = kernel.spare_user(os.getpid()) if self._root else None
        self._filter: int | None = None
        self._root_arguments: list[str] = []
        if self._bubblewrap is None:
            if setup.mechanism.privileged:
                self._uid = None
        else:
            self._prepare_to_confine(setup, parent, stack)
        self._folder = tempfile.mkdtemp(prefix="sandbox-")
        stack.callback(_remove_directory, self._folder)
        os.chmod(self._folder, 0o711)

    def _prepare_to_confine(self, setup: Setup, parent: int, stack: contextlib.ExitStack) -> None:
        """Loads the filter, and leaves the mounts and the network of the machine."""
        self._root_arguments = root_arguments(setup.readable)
        if setup.system_call_filter is not None:
            self._filter = os.memfd_create("filter")
            stack.callback(os.close, self._filter)
            os.write(self._filter, setup.system_call_filter)
        if setup.mechanism.privileged:
            kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET)
        else:
            self._enter_user_namespace(parent)
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)

    def _enter_user_namespace(self, parent: int) -> None:
        """Become root of a new user namespace, which is an unprivileged user outside."""
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

    def run(self, command: Command) -> Outcome | str:
        """Run a program and kill what is left of it; the reason as text if the sandbox could
        not be set up.
        """
        with contextlib.ExitStack() as stack:
            self._fill(command, stack)
            stdin, stdout, stderr = (
                stack.enter_context(open(f"{self._folder}/fd/{number}", "r+b" if number else "rb"))
                for number in range(3)
            )
            report, writer = os.pipe()
            stack.callback(os.close, report)
            start = time.monotonic()
            try:
                process = self._start(command, (stdin, stdout, stderr), writer)
            finally:
                os.close(writer)
            in_time, seen_seconds = _wait(
                process, command.limits, start + command.limits.wall_seconds
            )
            code, waited_seconds = _end(process)
            cpu_seconds = max(seen_seconds, waited_seconds)
            wall_seconds = time.monotonic() - start
            errors = os.pread(stderr.fileno(), _STDERR_BYTES, 0)
            if self._bubblewrap is not None and in_time:
                # It reports the exit code if and only if it had finished its set-up.
                if b'"exit-code"' not in os.read(report, 65536):
                    reason = errors.decode(errors="replace").strip()
                    return reason or "bubblewrap ended during its set-up"
            size = os.fstat(stdout.fileno()).st_size
            kept = os.pread(stdout.fileno(), min(size, command.limits.output_bytes), 0)
            ending = _ending(
                command.limits, size=size, cpu_seconds=cpu_seconds, code=code, in_time=in_time
            )
            return Outcome(
                ending=ending,
                code=code if in_time else _KILLED,
                stdout=kept,
                stderr=errors,
                cpu_seconds=cpu_seconds,
                wall_seconds=wall_seconds,
            )

    def _fill(self, command: Command, stack: contextlib.ExitStack) -> None:
        """The program's directory and streams; in memory, and limited together, where the
        program is confined.
        """
        limits = command.limits
        box = f"{self._folder}/box"
        streams = f"{self._folder}/fd"
        sizes = (
            (box, limits.disk_bytes, _INODES),
            (streams, len(command.stdin) + 3 * limits.disk_bytes, _STREAMS),
        )
        for path, size, inodes in sizes:
            os.mkdir(path)
            if self._bubblewrap is None:
                stack.callback(shutil.rmtree, path, ignore_errors=True)
            else:
                stack.callback(_remove_directory, path)
                kernel.mount("tmpfs", path, "tmpfs", _IN_MEMORY, f"size={size},nr_inodes={inodes}")
                stack.callback(kernel.unmount, path)
        for number, content in enumerate((command.stdin, b"", b"")):
            _write(f"{streams}/{number}", content, 0o666 if number else 0o444)
        for name, content in command.files.items():
            _write(f"{box}/{name}", content, 0o555)
        os.chmod(streams, 0o755)
        os.chmod(box, 0o700)
        if self._uid is not None:
            os.chown(box, self._uid, self._uid)

    def _start(
        self, command: Command, streams: tuple[BinaryIO, BinaryIO, BinaryIO], status: int
    ) -> int:
        """status: descriptor for bubblewrap's report. Returns the process id."""
        stdin, stdout, stderr = streams
        if self._bubblewrap is None:
            others = 0 if self._uid is not None else _threads_of_user()
            processes = command.limits.processes + others
            line = limits_line(command, processes=processes, root=self._root, uid=self._uid)
            environment = dict(command.environment)
            directory = f"{self._folder}/box"
            inherited = []
        else:
            line = bubblewrap_line(
                self._bubblewrap,
                command,
                self._root_arguments,
                self._folder,
                status=status,
                seccomp=self._filter,
                uid=self._uid,
            )
            environment = {}
            directory = "/"
            inherited = [status]
            if self._filter is not None:
                os.lseek(self._filter, 0, os.SEEK_SET)
                inherited.append(self._filter)
        process = subprocess.Popen(
            line,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            cwd=directory,
            pass_fds=inherited,
            start_new_session=True,
            umask=0o022,
        )
        process.returncode = 0  # it is reaped in `_end`
        return process.pid


def _remove_directory(path: str) -> None:
    """An empty one: what is left in a directory whose mount was not undone stays."""
    with contextlib.suppress(OSError):
        os.rmdir(path)


def _write(path: str, content: bytes, mode: int) -> None:
    with open(path, "wb") as file:
        file.write(content)
    os.chmod(path, mode)


def _ending(limits: Limits, *, size: int, cpu_seconds: float, code: int, in_time: bool) -> Ending:
    if size > limits.output_bytes:
        return "output"
    if cpu_seconds > limits.cpu_seconds or code == 128 + signal.SIGXCPU:
        return "cpu_time"
    return "exit" if in_time else "wall_time"


def _wait(pid: int, limits: Limits, deadline: float) -> tuple[bool, float]:
    """Whether the process ends before the deadline and within its CPU time, and the CPU seconds
    seen. It is not reaped.

    The time of processes that are killed together with their namespace is not passed on to any
    parent.
    """
    descriptor = os.pidfd_open(pid)
    seconds = 0.0
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while seconds <= limits.cpu_seconds:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            if poll.poll(1000 * min(remaining, limits.cpu_seconds / _LOOKS)):
                return True, seconds
            seconds = max(seconds, _cpu_seconds(pid))
        return False, seconds
    finally:
        os.close(descriptor)


def _cpu_seconds(pid: int) -> float:
    """CPU seconds of a process, its descendants and those that were waited for."""
    processes = _processes()
    seconds = 0.0
    family = [pid]
    for member in family:  # grows while it is read
        family += [child for child, process in processes.items() if process.parent == member]
        if member in processes:
            seconds += processes[member].cpu_seconds
    return seconds


def _end(pid: int) -> tuple[int, float]:
    """Kill and reap a child and all of its descendants; its exit status and the CPU seconds of
    all.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        code = 128 - code
    return code, usage.ru_utime + usage.ru_stime + _end_children()


def _end_children() -> float:
    """Kill and reap all children and what they leave; their CPU seconds.

    In a process namespace all die with its first process. Those whose parents die become the
    launcher's.
    """
    seconds = 0.0
    launcher = os.getpid()
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            for pid, process in _processes().items():
                if process.parent == launcher:
                    os.kill(pid, signal.SIGKILL)
            _, _, usage = os.wait4(-1, 0)
            seconds += usage.ru_utime + usage.ru_stime
    return seconds


def _threads_of_user() -> int:
    """Threads of this process's user, which the limit of processes counts."""
    user = os.getuid()
    return sum(process.threads for process in _processes().values() if process.user == user)


class _Process(NamedTuple):
    parent: int
    user: int
    threads: int
    cpu_seconds: float  # with those of the children that it waited for


def _processes() -> dict[int, _Process]:
    """All processes by their process ids; zombies too."""
    processes: dict[int, _Process] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        # OSError: it has ended.
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
            user = os.fstat(file.fileno()).st_uid
            seconds = sum(map(int, fields[11:15])) / _TICKS
            processes[int(name)] = _Process(int(fields[1]), user, int(fields[17]), seconds)
    return processes


if __name__ == "__main__":
    main(sys.argv[1:])
