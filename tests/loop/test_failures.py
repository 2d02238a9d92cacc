"""How a failing rank ends the others is tested on whole runs in ``bad_input/test_ranks.py``;
here its parts.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_gspo.errors import RunError
from megatron_gspo.loop.failures import _summary, exit_together, lost_contact
from tests.support.command_line import in_fork


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[../gloo/pair.cc:12] Connection closed by peer [10.0.0.7]:1234"), True),
        (RuntimeError("NCCL communicator was aborted"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (dist.DistError("anything"), True),
        (RuntimeError("shape mismatch"), False),
        (RunError("gloo"), False),
        (ValueError("connection reset"), False),
    ],
)
def test_errors_of_communication_are_known(error, lost):
    assert lost_contact(error) is lost


def test_an_error_of_communication_is_one_sentence():
    error = RuntimeError(
        "[/pytorch/gloo/pair.cc:12] [a.cc:3] Connection closed. More words\nand lines"
    )
    assert _summary(error) == "Connection closed"


def guarded(error: BaseException | None, tmp_path):
    def action() -> None:
        with exit_together(run_dir=tmp_path, backend="gloo", timeout_minutes=1.0):
            if error is not None:
                raise error

    return in_fork(action)


def test_the_exit_code_and_the_line(tmp_path):
    assert guarded(None, tmp_path).code == 0
    failed = guarded(RunError("it broke"), tmp_path)
    assert (failed.code, failed.messages) == (
        1,
        ["error: it broke"],
    )
    assert "Traceback" not in failed.text
    bug = guarded(KeyError("x"), tmp_path)
    assert bug.code == 1 and "Traceback" in bug.text
    assert bug.messages == ["error: KeyError: 'x' (the traceback is in its log)"]
    foreign = guarded(RunError("server a: \x1b]0;title\x07\rdone\u202e"), tmp_path)
    assert foreign.messages == ["error: server a: \\x1b]0;title\\x07\\rdone\\u202e"]
    stopped = guarded(KeyboardInterrupt(), tmp_path)
    assert stopped.code == 130 and len(stopped.messages) == 1
    start = "error: interrupted; there is no checkpoint yet, start again from the first step"
    assert stopped.messages[0].startswith(start)
    assert "checkpoint.save_interval" in stopped.messages[0]
