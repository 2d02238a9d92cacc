"""bubblewrap's command line."""

import pytest

from megatron_gspo.rewards.sandbox.bubblewrap import arguments
from megatron_gspo.rewards.sandbox.command import Command, Limits, Mechanism, Setup

LIMITS = Limits(1.0, 2.0, 2**29, 7, 10, 4096)
COMMAND = Command(("/opt/py/bin/python", "main.py"), {"main.py": b"x"}, LIMITS, b"", {"A": "b"})


def line(privileged, uid):
    setup = Setup(Mechanism("bubblewrap", privileged), ("/usr", "/opt/py"), "/usr/bin/bwrap")
    return arguments(setup, COMMAND, {"main.py": 9}, status=8, seccomp=7, uid=uid)


def has(words, *run):
    return any(tuple(words[i : i + len(run)]) == run for i in range(len(words)))


@pytest.mark.parametrize(("privileged", "uid"), [(True, 5), (False, None)])
def test_what_all_have(privileged, uid):
    words = line(privileged, uid)
    assert words[0] == "/usr/bin/bwrap"
    for option in ("--unshare-pid", "--unshare-ipc", "--die-with-parent", "--new-session", "--clearenv"):
        assert option in words
    assert has(words, "--ro-bind", "/usr", "/usr")
    assert has(words, "--perms", "0755", "--dir", "/opt", "--ro-bind", "/opt/py", "/opt/py")
    assert has(words, "--size", "4096", "--tmpfs", "/box", "--perms", "0555", "--file", "9", "/box/main.py")
    assert has(words, "--setenv", "A", "b") and has(words, "--json-status-fd", "8") and has(words, "--seccomp", "7")
    assert words.index("--remount-ro") > max(i for i, word in enumerate(words) if word in ("--symlink", "--file"))
    assert has(words, "/usr/bin/prlimit", "--nproc=7") and "--as=536870912:536870912" in words
    assert words[-3:] == ["--", "/opt/py/bin/python", "main.py"]


def test_root_gives_the_program_a_user_and_no_capability():
    words = line(True, 5)
    assert "--unshare-user" not in words and "--unshare-net" not in words  # the launcher has left the network
    assert has(words, "/usr/bin/setpriv", "--reuid", "5", "--regid", "5", "--clear-groups", "--bounding-set=-all")


def test_a_user_has_namespaces_of_its_own():
    words = line(False, None)
    assert "--unshare-user" in words and "--unshare-net" in words and "--cap-add" not in words
