"""From run directories to table, differences, search, cost and verdicts."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_gspo.tools.compare.claims import NOT, PARTLY, REPRODUCED, UNDECIDED, UNTESTED, claims
from megatron_gspo.tools.compare.costs import PUBLISHED, PaperModel, cost_of, model_of, on_paper
from megatron_gspo.tools.compare.run_records import ReportError, Run, read_run
from megatron_gspo.tools.compare.search import at_edge, choices, table
from megatron_gspo.tools.compare.study import differences, read_study, rows, study_of, values
from megatron_gspo.tools.compare.study_plan import load_comparison, report_runs, search_runs
from tests.tools.compare.synthetic import VARIANTS, Course, write_comparison, write_run


def compared(folder: Path, courses: dict[str, Course], seeds=(1, 2, 3)):
    """A study of run directories, one folder a variant and seed."""
    paths = [
        write_run(folder / name / str(seed), seed, course, steps=10)
        for name, course in courses.items()
        for seed in seeds
    ]
    return study_of(paths, "command")


def verdict(study, begin):
    return next(claim for claim in claims(study) if claim.claim.startswith(begin))


def test_run_directories_are_grouped_by_what_they_are(tmp_path):
    study = compared(tmp_path, VARIANTS, seeds=(1, 2))
    assert [group.name for group in study.groups] == [*VARIANTS]
    assert study.baseline == "grpo" and study.seeds == [1, 2]
    assert study.groups[1].overrides["routing.replay"] == "r2"
    assert "optimizer.lr" not in study.groups[0].overrides  # the same in all


def test_groups_that_differ_in_a_key_are_named_by_it(tmp_path):
    fast = Course(overrides={"optimizer.lr": 1e-3})
    study = compared(tmp_path, {"slow": Course(), "fast": fast}, seeds=(1,))
    assert [group.name for group in study.groups] == ["grpo lr=0.0005", "grpo lr=0.001"]


def test_directories_that_cannot_be_compared(tmp_path):
    first = write_run(tmp_path / "a", 1, Course(), steps=5)
    with pytest.raises(ReportError, match="same settings and seed 1 as"):
        study_of([first, write_run(tmp_path / "b", 1, Course(), steps=5)], "")
    with pytest.raises(ReportError, match="holds no run"):
        study_of([tmp_path / "nowhere"], "")
    with pytest.raises(ReportError, match="baseline = gspo: is no variant here; set one of grpo"):
        study_of([first], "", baseline="gspo")


def test_the_table_counts_every_run(tmp_path):
    paths = [
        write_run(tmp_path / "1", 1, Course(), steps=10),
        write_run(tmp_path / "2", 2, Course(collapses=4), steps=10),
        write_run(tmp_path / "3", 3, Course(fails=7), steps=10),
    ]
    half = write_run(tmp_path / "4", 4, Course(), steps=10)
    (half / "summary.json").unlink()
    row = rows(study_of([*paths, half], ""), "base")[0]
    assert row.counts == {"finished": 2, "failed": 1, "partial": 1, "missing": 0, "collapsed": 1}
    assert (row.broken, row.converged) == (2, 1)
    assert row.measures["final_accuracy"].count == 3  # the failed one counts with what it had, the open one not


def test_differences_are_paired_and_corrected(tmp_path):
    study = compared(tmp_path, {"grpo": Course(), "gspo": VARIANTS["gspo"], "r2": VARIANTS["grpo_r2"]})
    found = differences(study, "base", "final_accuracy")
    assert set(found) == {"gspo", "grpo_r2"}
    base, other = (values(study, "base", name, "final_accuracy") for name in ("grpo", "gspo"))
    assert found["gspo"].mean == pytest.approx(sum(other[seed] - base[seed] for seed in base) / 3)
    raw = sorted(item.p_t for item in found.values())
    corrected = sorted(item.p_holm for item in found.values())
    assert corrected[0] == pytest.approx(min(1.0, 2 * raw[0]))
    assert corrected[1] == pytest.approx(min(1.0, max(2 * raw[0], raw[1])))


def trial(variant, lr, seed, accuracy, status="finished"):
    records = [{"step": 5, "eval/accuracy": accuracy}] if accuracy is not None else []
    values = {"algorithm.epsilon_low": 0.2, "algorithm.epsilon_high": 0.27, "optimizer.lr": lr}
    return Run("search", variant, seed, Path(), status, records=records, trial=values)


def test_the_search_takes_the_best_mean_over_its_seeds(tmp_path):
    runs = [
        trial("grpo", 1e-4, 101, 0.5), trial("grpo", 1e-4, 102, 0.5),
        trial("grpo", 1e-3, 101, 0.9), trial("grpo", 1e-3, 102, 0.2, "failed"),
        trial("grpo", 3e-3, 101, 0.9), trial("grpo", 3e-3, 102, None, "missing"),
    ]  # fmt: skip
    found = table(runs)
    assert [row.accuracy for row in found] == pytest.approx([0.5, 0.55, None])
    assert [row.chosen for row in found] == [False, True, False]  # 3e-3 lacks a seed
    assert [row.failed for row in found] == [0, 1, 0]
    assert at_edge(found) == []
    assert at_edge(table(runs[:4])) == ["grpo"]


def test_what_was_chosen_reaches_the_variants_that_are_tuned_as_it(tmp_path):
    config = load_comparison(write_comparison(tmp_path)).config
    found = choices(config, table([trial("gspo", 1e-4, 101, 0.5), trial("gspo", 1e-3, 101, 0.6)]))
    assert found["gspo_token"]["optimizer.lr"] == found["gspo"]["optimizer.lr"] == 1e-3
    assert "grpo" not in found


def test_a_comparison_file_is_read_back_with_its_search(tmp_path):
    comparison = load_comparison(write_comparison(tmp_path, seeds=(1, 2)))
    for spec in search_runs(comparison):
        level = 0.7 - 300 * abs(spec.trial["optimizer.lr"] - 5e-4)
        write_run(spec.run_dir, spec.seed, replace(VARIANTS[spec.variant], level=level), steps=10)
    study = read_study(comparison, "command")
    assert {name: values["optimizer.lr"] for name, values in study.chosen.items()} == dict.fromkeys(VARIANTS, 5e-4)
    assert {run.status for run in study.runs} == {"missing"} and len(study.runs) == 24
    runs = report_runs(comparison, study.chosen)
    assert all(run.overrides["optimizer.lr"] == 5e-4 for run in runs if run.setting == "base")


def test_grpo_needs_replay_where_it_breaks_without_and_not_with(tmp_path):
    broken = {"grpo": Course(collapses=3), "r2": VARIANTS["grpo_r2"], "r3": VARIANTS["grpo_r3"]}
    found = verdict(compared(tmp_path / "a", broken), "On a mixture")
    assert found.verdict == REPRODUCED
    assert "0 of 3 plain GRPO runs converged; grpo_r2 3 of 3" in found.evidence[0]
    whole = {"grpo": Course(), "r2": replace(VARIANTS["grpo_r2"], level=0.5)}
    assert verdict(compared(tmp_path / "b", whole), "On a mixture").verdict == NOT
    higher = {"grpo": Course(), "r2": replace(VARIANTS["grpo_r2"], level=0.9)}
    better = verdict(compared(tmp_path / "d", higher), "On a mixture")
    assert better.verdict == NOT  # to end higher is something else than to be needed
    assert "Replay ended higher without stress, but" in better.evidence[-1]
    assert verdict(compared(tmp_path / "c", {"grpo": Course()}), "On a mixture").verdict == UNTESTED


def test_gspo_is_stable_if_none_of_its_runs_breaks(tmp_path):
    good = verdict(compared(tmp_path / "a", {"gspo": VARIANTS["gspo"]}), "GSPO trains stably")
    assert good.verdict == REPRODUCED and "3 of 3 runs converged, 0 failed" in good.evidence[0]
    paths = [write_run(tmp_path / "b" / str(s), s, replace(VARIANTS["gspo"], collapses=3 if s == 2 else None), steps=10)
             for s in (1, 2, 3)]  # fmt: skip
    assert verdict(study_of(paths, ""), "GSPO trains stably").verdict == NOT


def test_better_needs_every_interval_above_zero(tmp_path):
    up = compared(tmp_path / "a", {"grpo": Course(), "gspo": replace(VARIANTS["gspo"], level=0.95)})
    assert verdict(up, "At the same compute").verdict == REPRODUCED
    down = compared(tmp_path / "b", {"grpo": Course(level=0.95), "gspo": replace(VARIANTS["gspo"], level=0.4)})
    found = verdict(down, "At the same compute")
    assert found.verdict == NOT and "GSPO was worse there" in found.evidence[-1]


@pytest.mark.parametrize(
    "shifts, expected",
    [
        ((0.0, 0.0, 0.0), REPRODUCED),
        ((0.01, 0.0, -0.01), REPRODUCED),
        ((0.2, 0.0, -0.1), UNDECIDED),
        ((0.1, 0.1, 0.1), NOT),
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


@pytest.mark.parametrize("clipped, expected", [(0.9, REPRODUCED), (0.1, PARTLY), (0.001, NOT)])
def test_clipping_is_told_as_a_factor(tmp_path, clipped, expected):
    study = compared(tmp_path, {"grpo": Course(clipped=0.01), "gspo": replace(VARIANTS["gspo"], clipped=clipped)})
    assert verdict(study, "GSPO clips").verdict == expected


def test_a_claim_without_its_runs_is_not_tested(tmp_path):
    study = compared(tmp_path, {"grpo": replace(Course(), flips=0.0)}, seeds=(1,))
    assert {claim.verdict for claim in claims(study)} == {UNTESTED}


def test_cost_of_a_step_by_hand():
    records = [{"step": 1, "time/step": 99.0, "time/train": 99.0}]
    records += [
        {"step": 2, "time/step": 2.0, "time/train": 1.0, "time/forward": 0.3, "time/backward": 0.5,
         "time/generate": 0.4, "routing/replay_bytes": 640, "perf/tokens": 40, "perf/peak_memory_gib": 1.0},
        {"step": 3, "time/step": 3.0, "time/train": 1.0, "time/forward": 0.3, "time/backward": 0.5,
         "time/generate": 0.6, "time/evaluate": 1.0, "routing/replay_bytes": 320, "perf/tokens": 20,
         "perf/peak_memory_gib": 1.5},
    ]  # fmt: skip
    cost = cost_of("grpo", [Run("base", "grpo", 1, Path(), "finished", records=records)])
    assert cost.seconds == pytest.approx(
        {"time/generate": 0.5, "time/forward": 0.3, "time/backward": 0.5, "time/train": 0.2, "other": 0.5}
    )
    assert cost.step.mean == pytest.approx(2.0)  # (2 + 3 - 1) / 2: the first step and the evaluation are left out
    assert cost.replay_bytes_per_token == 16.0
    assert cost.memory_gib == 1.5


def test_routes_on_paper_by_hand():
    small, large = on_paper(PUBLISHED)
    assert (small.bytes_per_token, large.bytes_per_token) == (48 * 8, 94 * 8)
    assert small.tokens == 512 * 16_384 == 2**23
    assert small.batch_bytes == 3 * 2**30  # 384 = 3 * 2^7
    assert PaperModel("wide", 2, 257, 8).bytes_per_token == 32  # beyond 256 experts an id takes two bytes
    assert math.isclose(small.log_prob_bytes / 2**20, 32)


def test_the_models_own_routes_come_from_its_config(tmp_path):
    found = {"num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 6, "decoder_sparse_step": 2}
    (tmp_path / "config.json").write_text(json.dumps({**found, "mlp_only_layers": [3]}))
    found = model_of({"model": {"path": str(tmp_path)}})
    assert (found.layers, found.bytes_per_token) == (2, 8)  # layers 1, 3, 5 have experts, 3 is made dense
    assert model_of({"model": {"path": "nowhere"}}) is None
    (tmp_path / "config.json").write_text(
        '{"num_local_experts": 300, "num_experts_per_tok": 4, "num_hidden_layers": 4}'
    )
    assert model_of({"model": {"path": str(tmp_path)}}).bytes_per_token == 32


def test_runs_of_a_real_layout_are_read(tmp_path):
    path = write_run(tmp_path / "run", 3, Course(), steps=6)
    run = read_run(path, setting="base", variant="grpo")
    assert len(run.records) == 7 and run.config["algorithm"]["name"] == "grpo"
    assert run.environment["git_revision"] == "abc"
