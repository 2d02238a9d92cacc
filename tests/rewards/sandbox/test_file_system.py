"""The file system that programs see."""

import pytest

from tests.rewards.sandbox.mechanisms import PARAMETERS, local_sandbox


@pytest.fixture(scope="module", params=PARAMETERS)
def sandbox(request):
    sandbox = local_sandbox(request.param, time_limit=2.0)
    yield sandbox
    sandbox.close()


def test_the_root_has_what_programs_need_and_no_more(sandbox):
    outcome = sandbox.prepare(
        "import os\nprint(*sorted(os.listdir('/')))\nprint(*sorted(os.listdir('/dev')))"
    )("")
    root, devices = outcome.stdout.decode().splitlines()
    assert set(root.split()) - {"root", "opt", "home"} == {
        "bin",
        "box",
        "dev",
        "etc",
        "lib",
        "lib64",
        "tmp",
        "usr",
    }
    assert devices == "fd null random stderr stdin stdout urandom zero"
