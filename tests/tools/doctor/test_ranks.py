"""What the ranks exchange, and the findings of it."""

from __future__ import annotations

from dataclasses import replace

from megatron_gspo.tools.doctor.ranks import Exchange, judge_groups, judge_ranks


def test_a_wrong_sum_names_the_ranks() -> None:
    right = Exchange("tp", (0, 1), 0.002, 0, "nccl")
    wrong = Exchange("tp", (2, 3), 0.003, 5, "nccl")
    [finding] = judge_groups([right, right, wrong])
    assert (finding.level, finding.check) == ("error", "groups.tp")
    assert finding.what == "tp group of ranks 2-3: 5 of 262,144 sums are wrong"
    [finding] = judge_groups([right, replace(right, ranks=(2, 3), seconds=0.5)])
    assert (
        finding.what
        == "tp: 2 groups of 2 over nccl, exact; 1 MiB takes 500.00 ms in that of ranks 2-3"
    )


def test_ranks_that_differ() -> None:
    same = {"torch": "2.13.0", "apex": None}
    assert [finding.level for finding in judge_ranks([("a", same), ("a", same)])] == ["ok"]
    findings = judge_ranks([("a", same), ("b", same), ("a", {"torch": "2.11.0", "apex": None})])
    assert [(finding.level, finding.check) for finding in findings] == [
        ("error", "config.ranks"),
        ("error", "ranks.versions"),
    ]
    assert findings[0].what == "rank 1 loaded no config, or another than rank 0"
    assert findings[1].what == "torch differs: 2.13.0 on rank 0, 2.11.0 on rank 2"
