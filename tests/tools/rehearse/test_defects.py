"""Defects in the code of a step are reported, with their kind and place; a clean rehearsal
doesn't report them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from megatron_gspo.tools.rehearse.deadlock import compare_ranks
from megatron_gspo.tools.rehearse.records import RankRecord

from . import defects
from .on_fake_gpu import on_fake_gpu
from .test_rehearse_rank import rehearsed

LAYOUT = dict(tensor_model_parallel_size=2, expert_model_parallel_size=2)
PIPELINE = dict(pipeline_model_parallel_size=2)
HERE = "tests/tools/rehearse/defects.py"


def with_defects(rank: int, layout: dict[str, int], *entries: defects.Defect) -> RankRecord:
    with defects.defect(*entries):
        return rehearsed.__wrapped__(rank, 4, **layout)


@functools.lru_cache
def defective() -> RankRecord:
    """A rank with all defects that are of a rank alone."""
    return with_defects(
        0,
        LAYOUT,
        defects.BIAS_ON_THE_HOST,
        defects.CHECK_OF_EACH_LAYER,
    )


def clean() -> RankRecord:
    return rehearsed(0, 4, **LAYOUT)


def of_step(items: Iterable[Any], kind: str, function: str) -> list[Any]:
    """Those of a kind in the step that ``function`` of the defects causes itself."""
    return [
        item
        for item in items
        if item.kind == kind
        and item.phase == "forward_backward"
        and item.where[0].startswith(HERE)
        and item.where[0].endswith(" " + function)
    ]


@on_fake_gpu
def test_the_clean_rank_has_no_defect() -> None:
    assert not [finding for finding in clean().findings if finding.is_defect]


@on_fake_gpu
def test_a_host_tensor_in_a_layer() -> None:
    [finding] = of_step(defective().findings, "device_mix", "gating")
    assert finding.is_defect and finding.count == 4, finding  # two layers, two micro-batches


@on_fake_gpu
def test_an_item_in_a_layer() -> None:
    [sync] = of_step(defective().host_syncs, "item", "gating")
    assert sync.count == 4
    assert not [
        sync
        for sync in clean().host_syncs
        if sync.kind == "item" and sync.phase == "forward_backward"
    ]


@on_fake_gpu
def test_a_collective_that_one_rank_skips() -> None:
    clean_ranks = [rehearsed(rank, 4, **LAYOUT) for rank in (0, 1)]
    assert not compare_ranks(clean_ranks).disagreements
    skipping = with_defects(1, LAYOUT, defects.SKIPPED)
    [disagreement] = compare_ranks([clean_ranks[0], skipping]).disagreements
    assert disagreement.kind == "op, dtype, reduction"
    assert disagreement.group == "group tp of ranks 0-1"
    first, second = disagreement.first, disagreement.second
    assert (first.rank, second.rank) == (0, 1)
    assert first.where[0].startswith("megatron/core/distributed/finalize_model_grads.py")
    # Rank 1 is at the export of the weights meanwhile.
    assert "weight_sources.py" in " ".join(second.where)
    assert first.where[0] in str(disagreement) and second.where[0] in str(disagreement)


@on_fake_gpu
def test_a_send_without_its_receive() -> None:
    first = rehearsed(0, 4, **PIPELINE)
    last = rehearsed(2, 4, **PIPELINE)
    assert not compare_ranks([first, last]).disagreements
    deaf = with_defects(2, PIPELINE, defects.NO_RECEIVE)
    [disagreement] = compare_ranks([first, deaf]).disagreements
    assert (disagreement.kind, disagreement.group) == ("missing", "send of rank 0 to 2")
    sides = disagreement.first, disagreement.second
    assert [side.rank for side in sides] == [0, 2]
    assert all("p2p_communication.py" in side.where[0] for side in sides), str(disagreement)
