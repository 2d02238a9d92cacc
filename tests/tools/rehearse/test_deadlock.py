"""Collectives that do not fit together are found, with the two ranks and call sites; those that
do are not reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_gspo.tools.rehearse.deadlock import (
    Disagreement,
    compare_groups,
    compare_point_to_point,
    compare_ranks,
    find_circle,
)
from megatron_gspo.tools.rehearse.records import Collective
from tests.tools.rehearse.handmade import record

TP = ("tp", (0, 1))
DP = ("dp", (0, 1))
PP = ("pp", (0, 1))


def call(
    op: str,
    group: tuple[str, tuple[int, ...]],
    line: int,
    size: int = 8,
    dtype: str = "float32",
    **other,
) -> Collective:
    return Collective(
        op, *group, dtype, size, (f"layer.py:{line} forward",), "forward_backward", **other
    )


def program() -> list[Collective]:
    """What a rank of two calls: equal sums from one place, a gather, a sum elsewhere, one on
    another group.
    """
    sums = [call("allreduce", TP, 1)] * 3
    return [
        *sums,
        call("allgather", TP, 2, 16),
        call("allreduce", TP, 3),
        call("allreduce", DP, 4),
        sums[0],
    ]


def disagreement(ours: Sequence[Collective], theirs: Sequence[Collective]) -> Disagreement:
    (difference,) = compare_groups({0: ours, 1: theirs})
    assert (difference.first.rank, difference.second.rank) == (0, 1)
    return difference


def sites(disagreement: Disagreement) -> tuple[str, str]:
    first, second = (
        side.where[0].split()[0] if side.where else ""
        for side in (disagreement.first, disagreement.second)
    )
    return first, second


def test_equal_programs_agree():
    assert compare_groups({0: program(), 1: program()}) == []
    elsewhere = [replace(collective, where=("other.py:9 forward",)) for collective in program()]
    # A branch of the rank's own that does the same.
    assert compare_groups({0: program(), 1: elsewhere}) == []


@pytest.mark.parametrize("skipped", range(7))
def test_a_skipped_collective_is_named_where_the_programs_part(skipped):
    short = program()
    gone = short.pop(skipped)
    missing = disagreement(short, program())
    assert missing.kind == "missing" and missing.group == f"group {gone.group} of ranks 0-1"
    where_rank_0_is, where_rank_1_calls = sites(missing)
    assert where_rank_1_calls == gone.where[0].split()[0]
    later_calls = [
        call
        for call in program()[skipped + 1 :]
        if call.group == gone.group and call.where != gone.where
    ]
    if later_calls:
        assert where_rank_0_is == later_calls[0].where[0].split()[0]
    else:
        assert "makes no " in str(missing)


def test_swapped_collectives():
    ours = program()
    theirs = [*ours[:3], ours[4], ours[3], *ours[5:]]
    difference = disagreement(ours, theirs)
    assert (difference.kind, difference.agreed, sites(difference)) == (
        "swapped",
        3,
        ("layer.py:2", "layer.py:3"),
    )
    assert (
        str(difference)
        == "swapped: group tp of ranks 0-1, after 3 calls that agree: rank 0 calls allgather of tp"
        " with 16 bytes of float32 at layer.py:2 forward; rank 1 calls allreduce of tp with 8"
        " bytes of float32 at layer.py:3 forward"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"bytes": 4},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "bytes": 4},
        {"op": "reduce_scatter"},
        {"device": "cpu"},
        {"reduction": "max"},
    ],
)
def test_a_different_call_names_the_fields(change):
    theirs = program()
    theirs[3] = replace(theirs[3], **change)
    difference = disagreement(program(), theirs)
    expected = (
        ["op"]
        if "op" in change
        else sorted(change, key=["dtype", "device", "reduction", "bytes"].index)
    )
    assert (difference.kind, difference.agreed, sites(difference)) == (
        ", ".join(expected),
        3,
        ("layer.py:2", "layer.py:2"),
    )


def test_the_wrong_group_is_a_call_too_many_and_one_too_few():
    theirs = program()
    theirs[4] = replace(theirs[4], group="ep")
    differences = compare_groups({0: program(), 1: theirs})
    assert {(difference.group, difference.kind) for difference in differences} == {
        ("group tp of ranks 0-1", "missing"),
        ("group ep of ranks 0-1", "missing"),
    }
    assert all(set(sites(difference)) & {"layer.py:3"} for difference in differences)


def test_members_that_were_not_rehearsed_are_left_out():
    group = ("ep", (0, 1, 2, 3))
    assert (
        compare_groups({0: [call("allgather", group, 1)], 3: [call("allgather", group, 1)]}) == []
    )
    assert compare_groups({0: [call("allgather", group, 1)]}) == []
    (difference,) = compare_groups(
        {0: [call("allgather", group, 1)], 3: [call("allgather", group, 1, 9)]}
    )
    assert (difference.kind, difference.second.rank) == ("bytes", 3)


def test_uneven_all_to_all_parts_fit_pair_by_pair():
    parts = {0: ((1, 5), (1, 3)), 1: ((3, 4), (5, 4))}

    def programs(parts):
        return {
            rank: [call("alltoall_base", TP, 1, max(sum(sent), sum(got)), sent=sent, received=got)]
            for rank, (sent, got) in parts.items()
        }

    assert compare_groups(programs(parts)) == []
    assert [
        difference.kind for difference in compare_groups(programs(parts | {1: ((3, 4), (6, 4))}))
    ] == ["bytes"]
    assert [
        difference.kind for difference in compare_groups(programs(parts | {1: ((2, 4), (5, 4))}))
    ] == ["bytes"]


def test_opposite_order_on_two_groups_is_a_circle():
    ours = [call("allreduce", TP, 1), call("allreduce", DP, 2)]
    theirs = ours[::-1]
    assert compare_groups({0: ours, 1: theirs}) == []
    (circle,) = find_circle({0: ours, 1: theirs})
    assert circle.kind == "deadlock" and sites(circle) == ("layer.py:1", "layer.py:2")
    assert find_circle({0: ours, 1: ours}) == []


def send(peer: int, size: int = 8, **other) -> Collective:
    return call("send", PP, 5, size, peer=peer, **other)


def recv(peer: int, size: int = 8, **other) -> Collective:
    return call("recv", PP, 6, size, peer=peer, **other)


def nobody(rank: int, peer: int) -> None:
    return None


def test_sends_meet_receives():
    programs = {0: [send(1), recv(1), send(1, 4)], 1: [recv(0), recv(0, 4), send(0)]}
    assert compare_point_to_point(programs, nobody) == []


@pytest.mark.parametrize(
    "theirs, kind",
    [
        ([recv(0)], "missing"),
        ([recv(0), recv(0, 5)], "bytes"),
        ([recv(0), recv(0, 4, dtype="bfloat16")], "dtype"),
        ([recv(0), recv(0, 4), recv(0)], "missing"),
        ([], "missing"),
    ],
)
def test_a_send_without_its_receive(theirs, kind):
    (difference,) = compare_point_to_point({0: [send(1), send(1, 4)], 1: theirs}, nobody)
    assert (difference.kind, difference.first.rank, difference.second.rank) == (kind, 0, 1)
    assert difference.agreed == (
        0 if not theirs else min(2, len(theirs)) - (kind not in ("missing",))
    )


def test_a_receive_without_any_send():
    (difference,) = compare_point_to_point({0: [recv(1)], 1: []}, nobody)
    assert (difference.kind, difference.first.rank, difference.second.rank) == ("missing", 0, 1)


def pipeline(middle_sends: int) -> list:
    """Ranks 0, 1 and 3 of four stages, of which 1 stands for 2 too."""
    stages = (0, 1, 2, 3)
    programs = {
        0: [send(1), recv(1)],
        1: [recv(0), *[send(2)] * middle_sends, recv(2), send(0)],
        3: [recv(2), send(2)],
    }
    stands_for = {0: (0,), 1: (1, 2), 3: (3,)}
    return [
        record(
            rank,
            world=4,
            groups={"pp": stages},
            collectives=tuple(calls),
            stands_for=stands_for[rank],
        )
        for rank, calls in programs.items()
    ]


def test_a_stage_in_the_middle_stands_for_the_next():
    assert compare_ranks(pipeline(1)).disagreements == ()
    differences = compare_ranks(pipeline(2)).disagreements
    # rank 1 sends to its like, and the last stage receives from it, once
    assert {
        (difference.kind, difference.first.rank, difference.second.rank)
        for difference in differences
    } == {
        ("missing", 1, 1),
        ("missing", 3, 1),
    }
