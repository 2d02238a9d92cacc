"""Sandboxes of each way to set up bubblewrap that works on this machine."""

import contextlib
import functools
import os
from pathlib import Path

import pytest

from megatron_gspo.config.code_section import CodeConfig
from megatron_gspo.rewards.sandbox.command import SandboxError
from megatron_gspo.rewards.sandbox.isolation import find_interpreter, find_setup
from megatron_gspo.rewards.sandbox.sandboxes import LocalSandbox


def parameter(privileged):
    """Root tries what it sets up itself, and in slow tests what it sets up as another user."""
    slow = pytest.mark.slow if os.geteuid() == 0 and not privileged else ()
    return pytest.param(privileged, marks=slow, id="root" if privileged else "user")


PARAMETERS = [parameter(True), parameter(False)]


@functools.cache
def setup_of(privileged):
    """The interpreter and the set-up; skips where the machine has none."""
    reason = "not on this machine"
    # Another user cannot read an interpreter below /root; Debian's can be read by all.
    for executable in (None, "/usr/bin/python3"):
        try:
            interpreter = find_interpreter(executable)
            return interpreter, find_setup(interpreter, (privileged,))
        except SandboxError as error:
            reason = str(error)
    pytest.skip(reason)


def local_sandbox(privileged, **options):
    """A sandbox that is set up in that way."""
    return LocalSandbox(CodeConfig(**options), *setup_of(privileged))


def any_setup():
    """What works first of the two; skips where neither does."""
    for privileged in (True, False):
        try:
            return setup_of(privileged)
        except pytest.skip.Exception:
            continue
    pytest.skip("no isolation on this machine")


def any_sandbox(**options):
    """A sandbox in the first way that works; skips where none does."""
    return LocalSandbox(CodeConfig(**options), *any_setup())


def descendants(pid):
    """Processes below this one, zombies included."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}
