"""Runs tests in forks of a process that has imported torch, Transformers and Megatron, which takes
most of their time:

    python -m tests.seeded_bugs.warm_pytest     # in a copy of the project

Reads JSON lines, `[seconds, test, ...]`, and answers each with pytest's exit code, which is
negative where the tests took longer than that. What pytest printed is in OUTPUT.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys

OUTPUT = "pytest_output.txt"
OPTIONS = "-q -x --tb=short --disable-warnings -p no:cacheprovider --hypothesis-profile=seeded_bugs"


def import_slow_packages() -> None:
    """Only packages of others stay imported: each fork imports the project, with its bug."""
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch  # noqa: F401

    from megatron_gspo.patches import apply_patches

    apply_patches()
    import megatron.core.models.gpt  # noqa: F401
    import megatron.core.optimizer  # noqa: F401
    import transformers.modeling_utils  # noqa: F401

    for name in list(sys.modules):
        if name.partition(".")[0] == "megatron_gspo":
            del sys.modules[name]


def run_pytest(seconds: int, tests: list[str]) -> int:
    """The exit code of pytest in a fork. Nothing that the tests started outlives it."""
    process = os.fork()
    if process == 0:
        os.setsid()
        signal.alarm(seconds)  # ends the process
        with open(OUTPUT, "w", encoding="utf-8") as output, open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        import pytest

        code = pytest.main([*OPTIONS.split(), *tests])
        sys.stdout.flush()
        os._exit(code)
    _, status = os.waitpid(process, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    import_slow_packages()
    for line in sys.stdin:
        seconds, *tests = json.loads(line)
        print(run_pytest(seconds, tests), flush=True)
