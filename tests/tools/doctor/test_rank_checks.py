"""Findings of comparing the ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_gspo.tools.doctor.rank_checks import RankInfo, judge_clocks, judge_missing, judge_ranks, judge_shared


def fact(rank: int, node: int = 0, **changes: object) -> RankInfo:
    base = RankInfo(
        rank, rank % 2, f"node{node} boot{node}", f"node{node}", (f"10.0.0.{node + 1}",),
        gpu=f"GPU-{node}-{rank % 2}", gpus=2, versions=(("torch", "2.13.0"), ("megatron-core", "0.16.1")),
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


TWO_NODES = [fact(0), fact(1), fact(2, 1), fact(3, 1)]
NO_SKEW = dict.fromkeys(range(4), 0.0)


def faults(facts: list[RankInfo], offsets: dict[int, float] | None = None) -> list[tuple[str, str]]:
    found = judge_ranks(facts, NO_SKEW if offsets is None else offsets)
    return [(f.level, f.check) for f in found if f.level != "ok"]


def test_a_sane_cluster_has_no_faults():
    assert faults(TWO_NODES) == []
    text = judge_ranks(TWO_NODES, NO_SKEW)[0].what
    assert text == "all 4 ranks are present, on 2 hosts: node0 ranks 0-1, node1 ranks 2-3"


def test_facts_travel():
    assert [RankInfo.from_dict(f.as_dict()) for f in TWO_NODES] == TWO_NODES


@pytest.mark.parametrize(
    "changed, fault, says",
    [
        (fact(1, gpu="GPU-0-0"), ("error", "ranks.gpus"), "ranks 0-1 use the same GPU GPU-0-0 of node0"),
        (fact(1, gpu="", gpus=1), ("error", "ranks.gpus"), "rank 1: local rank 1 and only 1 GPUs"),
        (fact(1, gpu="", gpus=0), ("error", "ranks.gpus"), "rank 1 finds no GPU, others do"),
        (fact(1, versions=(("torch", "2.12.0"), ("megatron-core", "0.16.1"))), ("error", "ranks.versions"),
         "torch differs: 2.13.0 on ranks 0, 2-3, 2.12.0 on rank 1"),
    ],
)  # fmt: skip
def test_one_rank_differs(changed, fault, says):
    facts = [TWO_NODES[0], changed, *TWO_NODES[2:]]
    assert faults(facts) == [fault]
    assert any(says in f.line for f in judge_ranks(facts, NO_SKEW))


def test_the_same_gpu_number_on_two_hosts_is_no_duplicate():
    assert faults([fact(0, gpu="0"), fact(1, gpu="1"), fact(2, 1, gpu="0"), fact(3, 1, gpu="1")]) == []


def test_a_name_that_means_the_host_itself():
    loopback = [replace(f, addresses=("127.0.1.1",)) if f.rank < 2 else f for f in TWO_NODES]
    assert faults(loopback) == [("error", "ranks.hostnames")]
    assert faults([replace(f, interface="eth0") for f in loopback]) == []
    assert faults(loopback[:2], {0: 0.0, 1: 0.0}) == [("note", "ranks.hostnames")]
    assert faults([replace(f, addresses=()) for f in TWO_NODES[:2]], {}) == [("note", "ranks.hostnames")]
    both = [replace(f, addresses=("127.0.1.1", "10.0.0.1")) if f.rank < 2 else f for f in TWO_NODES]
    assert faults(both) == []


def test_hosts_of_one_name():
    twins = [replace(f, hostname="node0") for f in TWO_NODES]
    assert faults(twins) == [("warning", "ranks.hostnames")]


def test_unequal_hosts():
    assert ("warning", "ranks.per_host") in faults(TWO_NODES[:3], dict.fromkeys(range(3), 0.0))


@pytest.mark.parametrize(
    "offsets, level, says",
    [
        ({0: 0.0, 1: 0.0004}, "ok", "clocks agree within 1 ms"),
        ({0: 0.0, 1: 0.9}, "ok", "within 900 ms"),
        ({0: 0.0, 1: -3.0, 2: 0.5}, "warning", "the clocks of rank 1 and rank 2 are 3.5 s apart"),
        ({0: 0.0, 1: 40.0}, "error", "rank 0 and rank 1 are 40.0 s apart"),
    ],
)
def test_clocks(offsets, level, says):
    [found] = judge_clocks(offsets, 2)
    assert found.level == level and says in found.line


def test_missing_ranks():
    assert judge_missing([0, 1], 2, 5.0) == []
    [found] = judge_missing([0, 2, 7], 8, 5.0)
    assert found.level == "error" and found.what == "ranks 1, 3-6 of 8 did not arrive within 5 s"


def test_a_run_dir_that_is_not_shared():
    hosts = {f.rank: f.host for f in TWO_NODES}
    assert judge_shared({0: ("/shared/runs", 77), 2: ("/shared/runs", 77)}, hosts) == []
    assert judge_shared({}, hosts) == []
    [other_disk] = judge_shared({0: ("/home/runs", 77), 2: ("/home/runs", 78)}, hosts)
    assert other_disk.level == "warning"
    assert other_disk.what == "/home/runs on node1 (rank 2) is another directory than /home/runs on node0"
    [not_mounted] = judge_shared({0: ("/shared/runs", 77), 2: ("/", 2)}, hosts)
    assert not_mounted.what.startswith("/ on node1")
    same_host = dict.fromkeys(hosts, "node0 boot0")
    assert judge_shared({0: ("/home/runs", 77), 2: ("/home/runs", 78)}, same_host) == []
