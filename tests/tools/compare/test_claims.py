"""Verdicts on the claims, from runs with known figures."""

import json
from dataclasses import replace

import pytest

from megatron_gspo.tools.compare.claims import (
    NOT_SEEN,
    PARTLY,
    PRIMARY,
    SEEN,
    UNDECIDED,
    UNTESTED,
    claims,
    expectations,
)
from megatron_gspo.tools.compare.study import study_of, values
from megatron_gspo.tools.compare.study_plan import Expectation
from tests.tools.compare.synthetic import VARIANTS, Course, compared, write_run


def verdict(study, begin):
    return next(claim for claim in claims(study) if claim.claim.startswith(begin))


def test_grpo_needs_replay_where_it_breaks_without_and_not_with(tmp_path):
    broken = {"grpo": Course(collapses=3), "r2": VARIANTS["grpo_r2"], "r3": VARIANTS["grpo_r3"]}
    found = verdict(compared(tmp_path / "a", broken), "On a mixture")
    assert found.verdict == SEEN
    assert "0 of 3 plain GRPO runs converged; grpo_r2 3 of 3" in found.evidence[0]
    whole = {"grpo": Course(), "r2": replace(VARIANTS["grpo_r2"], level=0.5)}
    assert verdict(compared(tmp_path / "b", whole), "On a mixture").verdict == NOT_SEEN
    higher = {"grpo": Course(), "r2": replace(VARIANTS["grpo_r2"], level=0.9)}
    better = verdict(compared(tmp_path / "d", higher), "On a mixture")
    assert better.verdict == NOT_SEEN  # to end higher is something else than to be needed
    assert "Replay ended higher without stress, but" in better.evidence[-1]
    assert verdict(compared(tmp_path / "c", {"grpo": Course()}), "On a mixture").verdict == UNTESTED


def test_expectations_are_decided_by_the_mean_difference(tmp_path):
    """Accuracies at the end are the level within a point or so, and 0.05 after a collapse."""
    study = compared(tmp_path, {"grpo": Course(collapses=3), "gspo": VARIANTS["gspo"]})
    gap = sum(values(study, "base", "gspo", PRIMARY).values()) - sum(values(study, "base", "grpo", PRIMARY).values())
    points = 100 * gap / 3
    expected = [Expectation(higher="gspo", lower="grpo", points=p) for p in (points - 0.01, points + 0.01)]
    expected.append(Expectation(higher="grpo", lower="gspo", points=1))
    expected.append(Expectation(higher="grpo", lower="other", points=1))
    found = expectations(replace(study, expected=expected))
    assert [claim.verdict for claim in found] == [SEEN, NOT_SEEN, NOT_SEEN, UNTESTED]
    assert found[0].evidence[0].startswith(f"gspo less grpo: {points:+.1f} points, mean over seeds (")
    assert found[0].evidence[0].count("with seed") == 3


def test_runs_with_noise_are_not_called_unstressed(tmp_path):
    noise = {"router_noise.stress_test": True}
    courses = {
        "grpo": Course(overrides=noise),
        "gspo": replace(VARIANTS["gspo"], overrides=VARIANTS["gspo"].overrides | noise),
    }
    found = claims(compared(tmp_path, courses))
    lines = [line for claim in found for line in claim.evidence]
    assert not any("ithout stress" in line for line in lines)
    assert sum(line.startswith("With perturbed routers") for line in lines) >= 4


def test_gspo_is_stable_if_none_of_its_runs_breaks(tmp_path):
    good = verdict(compared(tmp_path / "a", {"gspo": VARIANTS["gspo"]}), "GSPO trains stably")
    assert good.verdict == SEEN and "3 of 3 runs converged, 0 failed" in good.evidence[0]
    paths = [write_run(tmp_path / "b" / str(s), s, replace(VARIANTS["gspo"], collapses=3 if s == 2 else None), steps=10)
             for s in (1, 2, 3)]  # fmt: skip
    assert verdict(study_of(paths, ""), "GSPO trains stably").verdict == NOT_SEEN


def test_better_needs_every_interval_above_zero(tmp_path):
    up = compared(tmp_path / "a", {"grpo": Course(), "gspo": replace(VARIANTS["gspo"], level=0.95)})
    assert verdict(up, "At the same compute").verdict == SEEN
    down = compared(tmp_path / "b", {"grpo": Course(level=0.95), "gspo": replace(VARIANTS["gspo"], level=0.4)})
    found = verdict(down, "At the same compute")
    assert found.verdict == NOT_SEEN and "GSPO was worse there" in found.evidence[-1]


@pytest.mark.parametrize(
    "shifts, expected",
    [
        ((0.0, 0.0, 0.0), SEEN),
        ((0.01, 0.0, -0.01), SEEN),
        ((0.2, 0.0, -0.1), UNDECIDED),
        ((0.1, 0.1, 0.1), NOT_SEEN),
    ],
)
def test_equal_means_that_the_interval_excludes_five_points(tmp_path, shifts, expected):
    """Differences 0.2, 0, -0.1: mean 0.033, error 0.088, and t(2) = 4.3 makes it 38 points wide on each side."""
    paths = []
    for seed, shift in zip((1, 2, 3), shifts, strict=True):
        for name, level in (("gspo", 0.5), ("gspo_token", 0.5 + shift)):
            path = write_run(tmp_path / name / str(seed), seed, VARIANTS[name], steps=1)
            (path / "metrics.jsonl").write_text(json.dumps({"step": 0, "eval/accuracy": level}))
            paths.append(path)
    assert verdict(study_of(paths, ""), "GSPO-token").verdict == expected


@pytest.mark.parametrize("clipped, expected", [(0.9, SEEN), (0.1, PARTLY), (0.001, NOT_SEEN)])
def test_clipping_is_told_as_a_factor(tmp_path, clipped, expected):
    study = compared(tmp_path, {"grpo": Course(clipped=0.01), "gspo": replace(VARIANTS["gspo"], clipped=clipped)})
    assert verdict(study, "GSPO clips").verdict == expected


def test_a_claim_without_its_runs_is_not_tested(tmp_path):
    study = compared(tmp_path, {"grpo": replace(Course(), flips=0.0)}, seeds=(1,))
    assert {claim.verdict for claim in claims(study)} == {UNTESTED}
