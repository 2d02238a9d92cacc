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


def test_the_number_of_files_is_limited(sandbox):
    program = sandbox.prepare("""
count = 0
try:
    while count < 5000:
        open(str(count), "w").close()
        count += 1
except OSError: pass
print(count)
""")
    assert 4000 < int(program("").stdout) < 4096


def test_devices_work_and_temporary_files_go_to_the_directory(sandbox):
    program = sandbox.prepare("""
import os, tempfile
print(len(os.urandom(8)), open("/dev/null").read() == "", tempfile.mkdtemp().startswith("/tmp/"))
print(os.path.realpath("/tmp"), os.getcwd())
""")
    assert program("").stdout == b"8 True True\n/box /box\n"
