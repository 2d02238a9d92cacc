"""Defects in the code of a step are reported, with their kind and place; a clean rehearsal
doesn't report them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from megatron_gspo.tools.rehearse.deadlock import Disagreement, compare_ranks
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
        defects.ROWS_OF_A_MASK,
        defects.UNPINNED_INPUTS,
        defects.METRICS_OF_THE_HOST,
    )


def clean() -> RankRecord:
    return rehearsed(0, 4, **LAYOUT)


def of_step(items: Iterable[Any], kind: str, function: str, file: str = HERE) -> list[Any]:
    """Those of a kind in the step that ``function`` of a file causes itself."""
    return [
        item
        for item in items
        if item.kind == kind
        and item.phase == "forward_backward"
        and item.where[0].startswith(file)
        and item.where[0].endswith(" " + function)
    ]


@on_fake_gpu
def test_the_clean_rank_has_no_defect() -> None:
    assert not [finding for finding in clean().findings if finding.is_defect]


@on_fake_gpu
def test_a_host_tensor_in_a_layer() -> None:
    [found] = of_step(defective().findings, "device_mix", "gating")
    assert found.is_defect and found.count == 4, found  # two layers, two micro-batches


@on_fake_gpu
def test_an_item_in_a_layer() -> None:
    [found] = of_step(defective().host_syncs, "item", "gating")
    assert found.count == 4
    assert not [
        sync
        for sync in clean().host_syncs
        if sync.kind == "item" and sync.phase == "forward_backward"
    ]


@on_fake_gpu
def test_rows_of_a_mask_are_counted_by_the_host() -> None:
    for kind in ("aten.index.Tensor", "aten.masked_select.default"):
        [found] = of_step(defective().host_syncs, kind, "gating")
        assert found.count == 4
        assert kind not in {
            sync.kind for sync in clean().host_syncs if sync.phase == "forward_backward"
        }


@on_fake_gpu
def test_a_copy_that_blocks() -> None:
    found = [copy for copy in defective().host_copies if copy.where[0].startswith(HERE)]
    assert {copy.phase for copy in found} == {"old_log_probs", "forward_backward"}
    assert all(copy.blocking and not copy.pinned for copy in found)
    assert all(any("micro_batch_inputs.py" in site for site in copy.where) for copy in found), found
    inputs = [
        copy
        for copy in clean().host_copies
        if any("micro_batch_inputs.py" in site for site in copy.where)
    ]
    assert inputs and not any(copy.blocking for copy in inputs)
    assert not [
        copy for copy in clean().host_copies if copy.phase == "forward_backward" and copy.blocking
    ]


@on_fake_gpu
def test_a_host_tensor_in_a_collective() -> None:
    for function in ("_sum", "_extremes"):
        file = "megatron_gspo/parallel/metric_reduction.py"
        [found] = of_step(defective().findings, "collective_on_cpu", function, file)
        assert found.is_defect and "dp_cp" in found.message


def disagreements(entry: defects.Defect) -> list[Disagreement]:
    """Of rank 0, which is clean, and rank 1, which has the defect."""
    first = rehearsed(0, 4, **LAYOUT)
    second = rehearsed(1, 4, **LAYOUT)
    assert not compare_ranks([first, second]).disagreements
    return list(compare_ranks([first, with_defects(1, LAYOUT, entry)]).disagreements)


def check(found: Disagreement, kind: str, group: str, files: tuple[str, str]) -> None:
    assert (found.kind, found.group) == (kind, f"group {group} of ranks 0-1"), str(found)
    assert (found.first.rank, found.second.rank) == (0, 1)
    sites = [" ".join(side.where) for side in (found.first, found.second)]
    assert all(file in site for file, site in zip(files, sites, strict=True)), str(found)
    assert all(side.where[0] in str(found) for side in (found.first, found.second))


@on_fake_gpu
def test_a_collective_that_one_rank_skips() -> None:
    [found] = disagreements(defects.SKIPPED)
    # Rank 1 is at the export of the weights meanwhile.
    check(found, "op, dtype, reduction", "tp", ("finalize_model_grads.py", "weight_sources.py"))
    assert found.first.where[0].startswith("megatron/core/distributed/finalize_model_grads.py")


@on_fake_gpu
def test_two_collectives_that_are_swapped() -> None:
    [found] = disagreements(defects.SWAPPED)
    check(found, "swapped", "ep", ("token_dispatch", HERE))


@on_fake_gpu
def test_a_send_without_its_receive() -> None:
    first = rehearsed(0, 4, **PIPELINE)
    last = rehearsed(2, 4, **PIPELINE)
    assert not compare_ranks([first, last]).disagreements
    [found] = compare_ranks([first, with_defects(2, PIPELINE, defects.NO_RECEIVE)]).disagreements
    assert (found.kind, found.group) == ("missing", "send of rank 0 to 2")
    assert (found.first.rank, found.second.rank) == (0, 2)
    assert all("p2p_communication.py" in side.where[0] for side in (found.first, found.second)), (
        str(found)
    )
