"""Sandboxes of each mechanism that works on this machine."""

import contextlib
import functools
import os
from pathlib import Path

import pytest

from megatron_gspo.config.code_section import CodeConfig
from megatron_gspo.rewards.sandbox.command import Mechanism, SandboxError
from megatron_gspo.rewards.sandbox.isolation import find_interpreter, find_isolation
from megatron_gspo.rewards.sandbox.sandboxes import LocalSandbox

# Another user cannot read an interpreter below /root; Debian's can be read by all.
MECHANISMS = (
    Mechanism("bubblewrap", True),
    Mechanism("bubblewrap", False),
)


def label(mechanism):
    return f"{mechanism.name}, {'root' if mechanism.privileged else 'user'}"


def parameter(mechanism):
    """Root tries what it sets up itself, and in slow tests what it sets up as another user."""
    slow = pytest.mark.slow if os.geteuid() == 0 and not mechanism.privileged else ()
    return pytest.param(mechanism, marks=slow, id=label(mechanism))


PARAMETERS = [parameter(mechanism) for mechanism in MECHANISMS]


@functools.cache
def isolation_of(mechanism):
    """The isolation, with the first interpreter that works; skips where the machine has none."""
    reason = "not on this machine"
    for executable in (None, "/usr/bin/python3"):
        try:
            interpreter = find_interpreter(executable)
            isolation = find_isolation(interpreter, (mechanism,))
        except SandboxError as error:
            reason = str(error)
            continue
        if not isolation.missing:
            return interpreter, isolation
        reason = f"does not isolate {isolation.missing}"
    pytest.skip(f"{label(mechanism)}: {reason}")


def local_sandbox(mechanism, **options):
    """A sandbox of that mechanism alone."""
    return LocalSandbox(CodeConfig(**options), *isolation_of(mechanism))


def any_sandbox(**options):
    """A sandbox of the first mechanism that works; skips where none does."""
    for mechanism in MECHANISMS:
        try:
            return local_sandbox(mechanism, **options)
        except pytest.skip.Exception:
            continue
    pytest.skip("no isolation on this machine")


def descendants(pid):
    """Processes below this one, zombies included."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family - {pid}
