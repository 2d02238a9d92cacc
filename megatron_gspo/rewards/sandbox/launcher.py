"""The process that starts sandboxes, one program at a time.

It runs in the bare interpreter with an empty environment and imports little: its forks are cheap and have nothing to
leak. It never sees an expected output.

Protocol (`wire`): a `Setup`, then `Command`s; each is answered by an `Outcome` or, if the sandbox failed, by the
reason as text.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from typing import NoReturn

from megatron_gspo.rewards.sandbox import bubblewrap, kernel, namespaces, wire
from megatron_gspo.rewards.sandbox.command import Command, Ending, Outcome, Setup

_STDERR_BYTES = 4096
_KILLED = 128 + signal.SIGKILL

Streams = tuple[int, int, int]


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
            _serve(reader, writer)
    finally:
        # A sandbox that is being set up does not yet die with this process.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_children()


def _exit(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _serve(reader: int, writer: int) -> None:
    """Until the other side closes its pipe."""
    try:
        setup = wire.receive(reader)
        entered = False
        while True:
            command = wire.receive(reader)
            try:
                if setup.mechanism.shares_network and not entered:
                    kernel.unshare(kernel.CLONE_NEWNET)
                    entered = True
                answer: Outcome | str = run(setup, command)
            except OSError as error:  # not permitted, or no process, descriptor or memory is left
                answer = f"{type(error).__name__}: {error}"
            wire.send(writer, answer)
    except (EOFError, BrokenPipeError):
        return


def run(setup: Setup, command: Command) -> Outcome | str:
    """Run a program and kill what is left of it; the reason as text if the sandbox could not be set up."""
    with contextlib.ExitStack() as stack:
        stdin, stdout, stderr = (_memory_file(stack, name) for name in ("stdin", "stdout", "stderr"))
        wire.write(stdin, command.stdin)
        os.lseek(stdin, 0, os.SEEK_SET)
        report, writer = os.pipe()
        stack.callback(os.close, report)
        start = time.monotonic()
        try:
            pid = _START[setup.mechanism.name](setup, command, (stdin, stdout, stderr), writer, stack)
        finally:
            os.close(writer)
        in_time = _wait(pid, start + command.limits.wall_seconds)
        code, cpu_seconds = _end(pid)
        wall_seconds = time.monotonic() - start
        size, errors = os.fstat(stdout).st_size, os.pread(stderr, _STDERR_BYTES, 0)
        if in_time and (reason := _failure(setup, os.read(report, 65536), errors)):
            return reason
        ending: Ending = "exit"
        if size > command.limits.output_bytes:
            ending = "output"
        elif cpu_seconds > command.limits.cpu_seconds or code == 128 + signal.SIGXCPU:
            ending = "cpu_time"
        elif not in_time:
            ending = "wall_time"
        kept = os.pread(stdout, min(size, command.limits.output_bytes), 0)
        return Outcome(ending, code if in_time else _KILLED, kept, errors, cpu_seconds, wall_seconds)


def _memory_file(stack: contextlib.ExitStack, name: str) -> int:
    descriptor = os.memfd_create(name)
    stack.callback(os.close, descriptor)
    return descriptor


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
    own, found = os.getpid(), []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == own:
                found.append(int(name))
    return found


def _failure(setup: Setup, report: bytes, errors: bytes) -> str | None:
    """Why the sandbox could not be set up, from what the child or bubblewrap reported."""
    if setup.mechanism.name != "bubblewrap":
        return report.decode(errors="replace") or None
    if b'"exit-code"' in report:  # written if and only if the set-up was finished
        return None
    return errors.decode(errors="replace").strip() or "bubblewrap ended during its set-up"


def _user(setup: Setup) -> tuple[int | None, int | None]:
    """(user that sets the sandbox up, user of the program) if they change, where this process is root."""
    user = kernel.spare_user(os.getpid()) if os.geteuid() == 0 else None
    return (None, user) if setup.mechanism.privileged else (user, user)


def _start_bubblewrap(
    setup: Setup, command: Command, streams: Streams, report: int, stack: contextlib.ExitStack
) -> int:
    import subprocess  # here: it makes forks slower, and nothing forks in this case

    assert setup.bubblewrap is not None
    contents = dict(command.files)
    if setup.system_call_filter is not None:
        contents[""] = setup.system_call_filter
    descriptors = {}
    for name, content in contents.items():
        descriptors[name] = _memory_file(stack, "file")
        wire.write(descriptors[name], content)
        os.lseek(descriptors[name], 0, os.SEEK_SET)
    inherited = (report, *descriptors.values())
    first, program = _user(setup)
    line = bubblewrap.arguments(
        setup, command, descriptors, status=report, seccomp=descriptors.pop("", None), uid=None if first else program
    )
    process = subprocess.Popen(
        line, stdin=streams[0], stdout=streams[1], stderr=streams[2], env={}, pass_fds=inherited, cwd="/", umask=0o22,
        user=first, group=first, extra_groups=None if first is None else [],
    )  # fmt: skip
    process.returncode = 0  # it is reaped in `_end`
    return process.pid


def _start_fork(
    setup: Setup, command: Command, streams: Streams, report: int, stack: contextlib.ExitStack
) -> int:
    box = _make_box(stack) if setup.mechanism.name == "limits" else None
    first, program = _user(setup)
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        for name in (signal.SIGPIPE, signal.SIGTERM, signal.SIGXFSZ):
            signal.signal(name, signal.SIG_DFL)
        os.umask(0o077)
        if first is not None:
            if box is not None:
                os.chown(box, first, first)
            kernel.become(first)
        kernel.signal_at_death_of_parent(signal.SIGKILL)  # after the change of the user, which clears it
        if box is not None:
            _execute_in(box, setup, command)
        namespaces.run_confined(setup, command, None if first else program, lambda: _execute(setup, command))
    except BaseException as error:
        os.write(report, f"{type(error).__name__}: {error}".encode()[:4096])
    os._exit(1)


def _make_box(stack: contextlib.ExitStack) -> str:
    import shutil
    import tempfile

    box = tempfile.mkdtemp(prefix="sandbox-")
    stack.callback(shutil.rmtree, box, ignore_errors=True)
    return box


def _execute_in(box: str, setup: Setup, command: Command) -> NoReturn:
    """Without an own file system: in a directory of the host."""
    os.chdir(box)
    for name, content in command.files.items():
        with open(name, "wb") as file:
            file.write(content)
        os.chmod(name, 0o555)
    kernel.drop_capabilities()
    kernel.limit_processes(_threads_of_user() + command.limits.processes)
    _execute(setup, command)


def _threads_of_user() -> int:
    """Threads of this process's user, which its limit of processes counts."""
    own, found = os.getuid(), 0
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            if os.stat(f"/proc/{name}").st_uid == own:
                found += int(file.read().rpartition(")")[2].split()[17])
    return found


def _execute(setup: Setup, command: Command) -> NoReturn:
    kernel.set_limits(command.limits)
    if setup.system_call_filter is not None:
        kernel.filter_system_calls(setup.system_call_filter)
    os.execve(command.argv[0], command.argv, dict(command.environment))


_START = {"bubblewrap": _start_bubblewrap, "namespaces": _start_fork, "limits": _start_fork}

if __name__ == "__main__":
    main(sys.argv[1:])
