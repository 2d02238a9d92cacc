"""The inputs of the forward step: what each stage gets, which positions are scored, and how far
ahead is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_gspo.data.packing import PackedBatch, pack
from megatron_gspo.mcore import micro_batch_inputs
from megatron_gspo.mcore.micro_batch_inputs import POLICY_LOSS, InputReader
from tests.support.samples import make_sample

COPIED = (
    "tokens",
    "position_ids",
    "labels",
    "segment_ids",
    "loss_mask",
    "advantages",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "response_mask",
    "teacher_top_ids",
    "teacher_top_log_probs",
    "rollout_top_ids",
    "rollout_top_log_probs",
    "centering_advantages",
)


def group(rank: int = 0, size: int = 1) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def groups(**given: Any) -> Any:
    return SimpleNamespace(**({"cp": group(), "tp": group()} | given))


def chunk(first: bool = True, last: bool = True, sequence_parallel: bool = False) -> Any:
    """Stands for a model chunk."""
    return SimpleNamespace(
        pre_process=first,
        post_process=last,
        config=SimpleNamespace(sequence_parallel=sequence_parallel),
    )


def batch(number: int = 0) -> PackedBatch:
    samples = [
        make_sample(3, 4, seed=number, mask=[True, False, True, True]),
        make_sample(2, 3, seed=number + 10),
    ]
    packed = pack(samples, num_sequences=2, num_tokens=6, sequence_multiple=4)
    shape = (len(packed.tokens), 2)
    return replace(
        packed,
        micro_batch=number,
        teacher_top_ids=torch.zeros(shape, dtype=torch.int32),
        teacher_top_log_probs=torch.zeros(shape),
        rollout_top_ids=torch.zeros(shape, dtype=torch.int32),
        rollout_top_log_probs=torch.zeros(shape),
        centering_advantages=torch.zeros(shape[0]),
    )


def reader(count: int = 1, trains: bool = True, **given: Any) -> InputReader:
    return InputReader(groups(**given), num_microbatches=count, loss=POLICY_LOSS if trains else ())


def counted(batches: list[PackedBatch], read: list[int]) -> Iterator[PackedBatch]:
    for batch in batches:
        read.append(batch.micro_batch)
        yield batch


@pytest.mark.parametrize(
    ("first", "last", "trains", "expected"),
    [
        (True, True, True, {*COPIED} - {"response_mask"}),
        (True, True, False, {"tokens", "position_ids", "labels"}),
        (True, False, True, {"tokens", "position_ids"}),
        (False, False, True, set()),
        (False, True, True, {"labels", *POLICY_LOSS}),
        (False, True, False, {"labels"}),
    ],
)
def test_a_stage_gets_what_it_reads(first, last, trains, expected, monkeypatch):
    # Stands for the GPU.
    monkeypatch.setattr(micro_batch_inputs, "compute_device", lambda: torch.device("meta"))
    given = batch()
    inputs = reader(trains=trains).next_inputs(iter([given]), chunk(first, last))
    there = {name for name in COPIED if getattr(inputs.batch, name).device.type == "meta"}
    assert there == expected
    assert inputs.batch.cu_seqlens.device.type == "cpu"
    assert not [name for name in there if getattr(inputs.batch, name).dtype == torch.int64]
    assert (inputs.scored is not None) == last
    if inputs.scored is not None:
        assert (
            inputs.scored.positions.device.type == "meta"
            and inputs.scored.positions.dtype == torch.int64
        )


def test_the_next_micro_batch_is_read_ahead_but_not_that_of_the_next_pass():
    read: list[int] = []
    batches = counted([batch(i) for i in range(7)], read)
    model = chunk()
    inputs = reader(count=3)
    for i in range(6):
        assert inputs.next_inputs(batches, model).batch.micro_batch == i
        assert read == list(range(min(i + 2, 3 if i < 3 else 6)))
