"""Command lines of programs."""

import pytest

from megatron_gspo.rewards.sandbox.bubblewrap import bubblewrap_line, limits_line
from megatron_gspo.rewards.sandbox.command import Command, Limits

LIMITS = Limits(1.0, 2.0, 2**29, 7, 10, 4096)
COMMAND = Command(("/opt/py/bin/python", "main.py"), {"main.py": b"x"}, LIMITS, b"", {"A": "b"})


def line(uid):
    return bubblewrap_line("/usr/bin/bwrap", COMMAND, "/tmp/x", status=8, seccomp=7, uid=uid)


def has(words, *run):
    return any(tuple(words[i : i + len(run)]) == run for i in range(len(words)))


@pytest.mark.parametrize("uid", [5, None])
def test_what_all_have(uid):
    words = line(uid)
    assert words[0] == "/usr/bin/bwrap"
    for option in (
        "--unshare-pid",
        "--unshare-ipc",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
    ):
        assert option in words
    assert has(words, "--ro-bind", "/tmp/x/root", "/", "--dev-bind", "/tmp/x/root/dev", "/dev")
    assert has(words, "--bind", "/tmp/x/fd", "/dev/fd", "--bind", "/tmp/x/box", "/box")
    assert (
        has(words, "--setenv", "A", "b")
        and has(words, "--json-status-fd", "8")
        and has(words, "--seccomp", "7")
    )
    assert has(words, "/usr/bin/prlimit", "--nproc=7") and "--as=536870912:536870912" in words
    assert words[-3:] == ["--", "/opt/py/bin/python", "main.py"]


def test_root_gives_the_program_a_user_and_no_capability():
    words = line(5)
    assert "--unshare-user" not in words
    assert has(
        words,
        "/usr/bin/setpriv",
        "--reuid",
        "5",
        "--regid",
        "5",
        "--clear-groups",
        "--bounding-set=-all",
    )


def test_a_user_has_a_namespace_of_its_own():
    words = line(None)
    assert has(words, "--unshare-user", "--uid", "1000") and "--cap-add" not in words


def test_limits_alone():
    words = limits_line(COMMAND, processes=9, root=True, uid=5)
    assert has(words, "--no-new-privs", "--pdeathsig", "KILL") and has(words, "--reuid", "5")
    assert "--bounding-set=-all" in words and has(words, "/usr/bin/prlimit", "--nproc=9")
    assert not has(limits_line(COMMAND, processes=9, root=False, uid=None), "--bounding-set=-all")
