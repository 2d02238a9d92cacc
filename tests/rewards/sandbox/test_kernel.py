"""What does not need a sandbox: user ids, limits."""

import os
import subprocess
import sys

import pytest


def spare_user_in(uid_map):
    """In a user namespace with that map; None where the kernel allows none."""
    code = (
        "import os, sys\nfrom megatron_gspo.rewards.sandbox import"
        " kernel\nkernel.unshare(kernel.CLONE_NEWUSER)\nprint('ready',"
        " flush=True)\ninput()\nprint(kernel.spare_user(5))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    if process.stdout.readline() != "ready\n":
        pytest.skip("no user namespaces")
    with open(f"/proc/{process.pid}/uid_map", "w") as file:
        file.write(uid_map)
    return process.communicate("\n")[0].strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="maps several ids, which root may")
@pytest.mark.parametrize(
    ("uid_map", "user"),
    [
        ("0 100000 65536", "65530"),
        ("0 100000 1", "None"),
        ("0 0 1\n1 100000 65535", "65530"),
        ("0 0 1000", "None"),
    ],
)
def test_a_spare_user_is_mapped(uid_map, user):
    assert spare_user_in(uid_map) == user
