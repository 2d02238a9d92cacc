"""Programs that attack the sandbox or go wrong by accident, each with the verdict that it must get.

The test gives the two numbers `2 3` and expects `5`. Most programs try something, print `escaped`
if it works and `5` if it is refused: `passed` then means contained. {NAMES} are filled in by the
test.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attack:
    """name: of the test. verdict: what it must get. program: Python on stdin and stdout."""

    name: str
    verdict: str
    program: str


def refused(name: str, statement: str, *, imports: str = "os") -> Attack:
    """A statement that must fail with an OSError."""
    return Attack(
        name,
        "passed",
        f"""
import {imports}
try:
    {statement}
except (OSError, ValueError):
    print(5)
else:
    print("escaped")
""",
    )


def denied_call(name: str, call: str) -> Attack:
    """A call of the C library that must return -1."""
    return Attack(
        name,
        "passed",
        f"""
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
print(5 if libc.{call} == -1 else "escaped")
""",
    )


RESOURCES = (
    Attack("fork bomb", "runtime_error", "import os\nwhile True: os.fork()"),
    Attack(
        "fork bomb that catches errors",
        "time_limit",
        """
import os
while True:
    try: os.fork()
    except OSError: pass
""",
    ),
    Attack(
        "thread bomb",
        "runtime_error",
        """
import threading, time
while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
""",
    ),
    Attack("memory bomb", "runtime_error", "x = []\nwhile True: x.append(bytearray(10 ** 7))"),
    Attack("memory bomb in one allocation", "runtime_error", "x = bytearray(10 ** 12)"),
    refused("anonymous mapping beyond the limit", "mmap.mmap(-1, 2 ** 31)", imports="mmap"),
    Attack(
        "zip bomb",
        "runtime_error",
        """
import zlib
parts = zlib.compressobj(1)
block = parts.compress(bytes(2 ** 20)) + parts.flush(zlib.Z_FULL_FLUSH)
zlib.decompress(block + block[2:] * 1000)
""",
    ),
    denied_call("System V shared memory", "shmget(0, 2 ** 20, 0o1600)"),
    denied_call("message queue", "msgget(0, 0o1600)"),
    refused("file in memory", "os.memfd_create('x')"),
    refused("file beyond the limit", "open('x', 'wb').truncate(2 ** 40)"),
    refused(
        "files beyond the limit", "[open(str(i), 'wb').write(bytes(2 ** 23)) for i in range(9)]"
    ),
    refused("empty files beyond the limit", "[open(str(i), 'w').close() for i in range(5000)]"),
    refused("directories beyond the limit", "[os.mkdir(str(i)) for i in range(5000)]"),
    refused("links beyond the limit", "[os.symlink('x', str(i)) for i in range(5000)]"),
    refused(
        "files beside its streams", "[open(f'/dev/fd/{i}', 'w').close() for i in range(3, 20)]"
    ),
    Attack(
        "children that nobody waits for",
        "time_limit",
        """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
reader, writer = os.pipe()
for _ in range(4):
    if os.fork() == 0:
        while time.process_time() < 0.2: pass
        os._exit(0)
os.close(writer)
os.read(reader, 1)  # until all have ended
print(5)
""",
    ),
    Attack(
        "children that nobody waits for, by sigaction",
        "time_limit",
        """
import ctypes, os, time
no_wait = (ctypes.c_ulong * 20)(0, *[0] * 16, 2)  # handler, mask of 128 bytes, SA_NOCLDWAIT
ctypes.CDLL(None).sigaction(17, no_wait, None)
reader, writer = os.pipe()
for _ in range(4):
    if os.fork() == 0:
        while time.process_time() < 0.2: pass
        os._exit(0)
os.close(writer)
os.read(reader, 1)  # until all have ended
print(5)
""",
    ),
    refused("too many open files", "[os.open('/dev/null', os.O_RDONLY) for _ in range(100)]"),
    Attack("endless output", "output_limit", "while True: print('x' * 10 ** 6)"),
    Attack("endless errors", "runtime_error", "import os\nwhile True: os.write(2, bytes(10 ** 6))"),
    Attack("busy loop", "time_limit", "while True: pass"),
    Attack(
        "busy loop that ignores the limit's signal",
        "time_limit",
        """
import signal
for name in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(name, signal.SIG_IGN)
while True: pass
""",
    ),
    Attack("sleep past the limit", "time_limit", "import time\ntime.sleep(100)"),
    Attack("stops itself", "time_limit", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"),
    Attack(
        "waits for input that never comes",
        "time_limit",
        "import os\nr, w = os.pipe()\nos.read(r, 1)",
    ),
    refused(
        "raises its memory limit",
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        imports="resource",
    ),
    refused(
        "raises its limit of processes",
        "resource.setrlimit(resource.RLIMIT_NPROC, (999, 999))",
        imports="resource",
    ),
    refused("raises its priority", "os.nice(-5)"),
    Attack("unbounded recursion", "runtime_error", "def f(): f()\nf()"),
    Attack(
        "stack overflow in C",
        "runtime_error",
        """
import sys, threading
sys.setrecursionlimit(10 ** 9)
threading.stack_size(2 ** 17)
def f(*x): return sorted([2, 1], key=lambda y: f(y))
threading.Thread(target=f).start()
""",
    ),
    Attack("segmentation fault", "runtime_error", "import ctypes\nctypes.string_at(0)"),
)

FILES = (
    refused("reads a file of the host", "open('{MARKER}').read()"),
    refused("reads it through a path upwards", "open('../../../../../..{MARKER}').read()"),
    refused("reads it through a symbolic link", "os.symlink('{MARKER}', 'x'); open('x').read()"),
    refused("reads it through its descriptor", "open('/proc/self/root{MARKER}').read()"),
    refused("reads the users", "open('/etc/passwd').read()"),
    refused("lists /proc", "os.listdir('/proc')"),
    refused("lists /sys", "os.listdir('/sys')"),
    refused("lists the host's home directories", "os.listdir('/home')"),
    Attack(
        "searches all files for the verifier's answers",
        "passed",
        """
import os
found = [f for top in ("/tmp", "/box", "/etc", "/dev") for _, _, files in os.walk(top) for f in files]
print("escaped" if "{MARKER}".rpartition("/")[2] in found else 5)
""",
    ),
    refused("writes to the root directory", "open('/x', 'w')"),
    refused("writes to the system", "open('/usr/x', 'w')"),
    refused("writes to the interpreter", "open(os.__file__, 'a')"),
    refused("replaces a device", "os.unlink('/dev/null')"),
    refused("writes beside the devices", "open('/dev/x', 'w')"),
    refused("replaces a stream", "os.unlink('/dev/stdin')"),
    refused("replaces the directory of temporary files", "os.unlink('/tmp')"),
    refused("links a file of the system", "os.link('/usr/bin/env', 'x')"),
    refused("makes a device", "os.mknod('x', 0o60666, os.makedev(1, 1))"),
    refused("opens the kernel's memory", "open('/dev/mem')"),
    refused("opens the terminal", "open('/dev/tty')"),
    Attack(
        "finds open files of the launcher",
        "passed",
        """
import os
def is_open(number):
    try: return bool(os.fstat(number))
    except OSError: return False
print(5 if [n for n in range(64) if is_open(n)] == [0, 1, 2] else "escaped")
""",
    ),
    Attack(
        "finds secrets in the environment",
        "passed",
        "import os\nprint(5 if set(os.environ) <= {'LC_CTYPE', 'PWD'} else 'escaped')",
    ),
    Attack(
        "finds the files of the run before",
        "passed",
        """
import os
print(5 if os.listdir(".") == ["main.py"] else "escaped")
open("left", "w").write("x")
""",
    ),
)

PROCESSES = (
    Attack(
        "kills all that it can",
        "passed",
        """
import os
try: os.kill(-1, 9)
except OSError: pass
print(5)
""",
    ),
    Attack(
        "kills its parent",
        "passed",
        """
import os, time
try: os.kill(os.getppid(), 9)
except OSError: pass
time.sleep(0.05)
print(5)
""",
    ),
    Attack("kills its group", "runtime_error", "import os\nos.killpg(0, 9)"),
    Attack("kills itself", "runtime_error", "import os\nos.kill(os.getpid(), 9)"),
    refused("signals the verifier", "os.kill({PID}, 0)"),
    denied_call("traces its parent", "ptrace(16, os.getppid(), 0, 0)"),
    denied_call("reads its parent's memory", "process_vm_readv(os.getppid(), 0, 0, 0, 0, 0)"),
    Attack(
        "leaves a daemon",
        "passed",
        """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(60)
    os._exit(0)
print(5)
""",
    ),
    Attack(
        "leaves children that ignore signals",
        "passed",
        """
import os, signal, time
for _ in range(3):
    if os.fork() == 0:
        for name in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(name, signal.SIG_IGN)
        time.sleep(60)
print(5)
""",
    ),
    Attack(
        "leaves zombies",
        "passed",
        """
import os
for _ in range(4):
    if os.fork() == 0: os._exit(0)
print(5)
""",
    ),
)

PRIVILEGES = (
    refused("becomes root", "os.setuid(0)"),
    denied_call("makes a user namespace", "unshare(0x10000000)"),
    denied_call("makes a user namespace by clone", "syscall(56, 0x10000011, 0, 0, 0, 0)"),
    denied_call("mounts", "mount(b'none', b'/box', b'tmpfs', 0, None)"),
    denied_call("unmounts its directory", "umount2(b'/box', 2)"),
    refused("changes its root", "os.chroot('/box')"),
    denied_call("loads a BPF program", "syscall(321, 0, 0, 0)"),
    denied_call("reads a kernel key", "syscall(250, 0, -3, 0)"),
    denied_call("sets the host's name", "sethostname(b'x', 1)"),
    refused(
        "runs sudo",
        "os.execv('/usr/bin/sudo', ['sudo', '-n', 'true']) if os.path.exists('/usr/bin/sudo') and"
        " not __import__('subprocess').run(['/usr/bin/sudo', '-n', 'true']).returncode else"
        " open('/nowhere')",
    ),
)

NETWORK = (
    refused(
        "connects to the host",
        "socket.create_connection(('127.0.0.1', {PORT}), 5)",
        imports="socket",
    ),
    refused(
        "sends a datagram",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {PORT}))",
        imports="socket",
    ),
    refused("listens", "socket.create_server(('127.0.0.1', 0))", imports="socket"),
    refused("asks for a name", "socket.getaddrinfo('example.com', 80)", imports="socket"),
    refused(
        "opens a raw socket", "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)", imports="socket"
    ),
    refused(
        "asks the hypervisor",
        "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).connect((2, 1))",
        imports="socket",
    ),
    refused(
        "connects to an abstract socket of the host",
        "socket.socket(socket.AF_UNIX).connect('\\0{ABSTRACT}')",
        imports="socket",
    ),
)

ANSWERS = (
    Attack(
        "opens its streams by name",
        "passed",
        """
a, b = map(int, open('/dev/stdin').read().split())
assert open('/dev/fd/0').read() == '2 3\\n' and open('/dev/null').read() == ''
open('/dev/stderr', 'a').write('debug')
open('/dev/stdout', 'w').write(f'{a + b}\\n')
""",
    ),
    Attack("exit", "passed", "print(5)\nexit()"),
    Attack(
        "quit in a function", "passed", "def f():\n    print(5)\n    quit(0)\nf()\nprint('never')"
    ),
    Attack("exit with a status", "runtime_error", "print(5)\nexit(1)"),
    Attack(
        "what else the interpreter has",
        "passed",
        """
import sys
assert all(callable(f) for f in (help, copyright, credits, license)) and 'Python' in repr(copyright)
assert sys.argv == ['main.py'] and __name__ == '__main__' and open(__file__).read()
print(5)
""",
    ),
    Attack("exits early with success", "wrong_answer", "import sys\nsys.exit(0)"),
    Attack("ends without its buffer", "wrong_answer", "import os\nprint(5, end='')\nos._exit(0)"),
    Attack("prints the answer and fails", "runtime_error", "print(5)\nraise SystemExit(1)"),
    Attack(
        "prints the answer and crashes",
        "runtime_error",
        "import os\nprint(5, flush=True)\nos.abort()",
    ),
    Attack(
        "prints the answer and hangs",
        "time_limit",
        "import time\nprint(5, flush=True)\ntime.sleep(100)",
    ),
    Attack("closes standard output", "wrong_answer", "import os\nos.close(1)\nos._exit(0)"),
    Attack(
        "overwrites its output",
        "passed",
        "import os\nos.write(1, b'77')\nos.ftruncate(1, 0)\nos.lseek(1, 0, 0)\nprint(5)",
    ),
    Attack("not a program", "runtime_error", "The sum is five."),
    Attack("empty program", "wrong_answer", ""),
)

ATTACKS = (*RESOURCES, *FILES, *PROCESSES, *PRIVILEGES, *NETWORK, *ANSWERS)

# Programs whose function `add` is called; the test gives 2 and 3 and expects 5.
CALLS = (
    Attack("returns the answer", "passed", "def add(a, b): return a + b"),
    Attack("prints beside it", "passed", "def add(a, b): print('debug'); return a + b"),
    Attack(
        "method of a class",
        "passed",
        "class Solution:\n    def add(self, a: int, b: int) -> int: return a + b",
    ),
    Attack(
        "has a main part",
        "passed",
        "def add(a, b): return a + b\nif __name__ == '__main__': print(input())",
    ),
    Attack("has no such function", "runtime_error", "def other(a, b): return a + b"),
    Attack("raises", "runtime_error", "def add(a, b): raise ValueError(a)"),
    Attack("exits early", "wrong_answer", "import sys\ndef add(a, b): sys.exit(0)"),
    Attack(
        "object that equals everything",
        "runtime_error",
        "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
    ),
    Attack(
        "number that equals everything",
        "wrong_answer",
        "class Any(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Any(7)",
    ),
    Attack(
        "writes a deep result itself",
        "wrong_answer",
        "import os\ndef add(a, b): os.write(3, b'[' * 10 ** 6); os._exit(0)",
    ),
    Attack(
        "writes two results",
        "wrong_answer",
        "import os\ndef add(a, b): os.write(3, b'5 '); return 5",
    ),
    Attack("never returns", "time_limit", "import time\ndef add(a, b): time.sleep(100)"),
    Attack(
        "result that is no JSON",
        "wrong_answer",
        "import os\ndef add(a, b): os.write(3, b'\\xff'); os._exit(0)",
    ),
    Attack(
        "looks for the expected value",
        "passed",
        """
import sys
def add(a, b):
    names = [name for frame in (sys._getframe(i) for i in range(2)) for name in (*frame.f_locals, *frame.f_globals)]
    assert not any("expected" in name or "accepted" in name for name in names)
    return a + b
""",
    ),
)
