"""What the doctor reports about known issues."""

from __future__ import annotations

from dataclasses import replace

from megatron_gspo.patches.issue import KnownIssue, Situation
from megatron_gspo.patches.known_issues import KNOWN_ISSUES
from megatron_gspo.tools.doctor.issue_checks import check_issues, judge_issue

GPU = Situation(megatron=(0, 19, 2), gpu=True, gloo=False, transformer_engine=True, has_config=True)


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


def test_a_handled_issue_names_its_patch():
    finding = judge_issue(KNOWN_ISSUES[0], [])
    assert finding.level == "note" and finding.check == "known_issues.expert_gradients"
    assert finding.line.startswith("megatron-core 0.16.1 - 0.18.2: TP > 1")
    assert finding.line.endswith("handled by patches/expert_gradients.py (1)")
    by_place = {issue.handled_by: judge_issue(issue, []).why for issue in KNOWN_ISSUES}
    freed = "`mcore/model.py`: `deallocate_pipeline_outputs` off under interleaving and on gloo"
    assert by_place[freed].startswith("handled by mcore/model.py: deallocate")
    hook = "`sglang_on_cpu/sitecustomize.py` (1)"
    assert by_place[hook] == "handled by patches/sglang_on_cpu/sitecustomize.py (1)"


def test_no_issue_is_one_finding():
    [finding] = check_issues(replace(GPU, megatron=(0, 20, 0)))
    assert (finding.level, finding.check) == ("ok", "known_issues.all")
