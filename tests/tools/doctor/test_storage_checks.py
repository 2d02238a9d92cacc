"""Judgements on free disk and shared memory."""

from __future__ import annotations

import pytest

from megatron_gspo.tools.doctor.disk_space import Needs
from megatron_gspo.tools.doctor.storage_checks import judge_disk, judge_shared_memory

GIB = 1 << 30


@pytest.mark.parametrize(
    "free, held, level",
    [(100 * GIB, 0, "ok"), (40 * GIB, 0, "warning"), (20 * GIB, 0, "error"), (10 * GIB, 60 * GIB, "ok")],
)
def test_disk(free, held, level):
    found = judge_disk("runs/a", free, held, Needs(checkpoint=16 * GIB, checkpoints=3, export=4 * GIB))
    assert found.level == level
    assert f"{free // GIB}.0 GiB free, the run writes 3 checkpoints of 16.0 GiB and an export of 4.0 GiB" in found.what
    if level == "error":
        assert found.fix.startswith("free 32.0 GiB")


def test_shared_memory():
    assert judge_shared_memory(0, 64 << 20, 8, gpu=False).level == "ok"
    assert judge_shared_memory(64 << 20, 64 << 20, 8, gpu=True).level == "warning"
    assert judge_shared_memory(2 * GIB, 2 * GIB, 8, gpu=True).level == "ok"
