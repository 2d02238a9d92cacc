"""What the doctor reports about known issues."""

from __future__ import annotations

from megatron_gspo.patches.issue import KnownIssue
from megatron_gspo.tools.doctor.issue_checks import judge_issue


def test_a_patch_that_is_not_active_is_an_error():
    issue = KnownIssue(
        "`a.py`",
        "megatron-core 0.16.1",
        "x",
        "",
        "",
        "",
        lambda s: True,
        marked=("torch:ones_like",),
        present=("torch:no_such_name",),
    )
    assert issue.unpatched() == ["torch:ones_like", "torch:no_such_name"]
    finding = judge_issue(issue, issue.unpatched())
    assert finding.level == "error" and "torch:ones_like is upstream's" in finding.why
