"""Ratios of a run: sequences, clip bands, the response that is shown."""

import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_gspo.tools.compare.ratio_plots import (
    clip_band,
    cut_share,
    pick_response,
    ratio_files,
    sequence_log_ratios,
    spread_of,
)
from megatron_gspo.tools.compare.run_records import read_run
from megatron_gspo.tracking.run_directory import RunDirectory
from tests.tools.compare.synthetic import Course, write_run


def test_sequence_ratio_is_the_mean_log_ratio_of_its_tokens():
    arrays = {"log_ratio": np.float32([0.1, 0.3, -0.2]), "sequence": np.int32([4, 4, 7])}
    logs, numbers = sequence_log_ratios(arrays)
    assert numbers.tolist() == [4, 7]
    assert logs == pytest.approx([0.2, -0.2], abs=1e-7)


def test_cut_share_looks_at_the_side_that_the_advantage_pushes_to():
    logs = np.log(np.array([1.3, 1.3, 0.7, 0.7, 1.0]))
    advantage = np.array([1.0, -1.0, 1.0, -1.0, 1.0])
    assert cut_share(logs, advantage, (0.2, 0.27)) == 2 / 5


def test_clip_band_of_a_config_with_nulls_is_the_presets():
    assert clip_band({"algorithm": {"name": "gspo", "epsilon_low": None, "epsilon_high": 0.5}}) == (3e-4, 0.5)
    assert clip_band({"algorithm": {"name": "sapo", "epsilon_low": None, "epsilon_high": None}}) is None


def write_ratios(path, **arrays):
    with RunDirectory(path) as directory:
        directory.write_config({"seed": 1, "algorithm": {"name": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.27}}, {})
        directory.write_ratios(10, arrays)
    return read_run(path, setting="base", variant="grpo")


def test_the_response_shown_is_the_one_that_spreads_most(tmp_path):
    run = write_ratios(
        tmp_path / "run",
        log_ratio=np.log(np.float32([1.1, 1.1, 1.1, 1.1, 1.4, 1.0, 0.5, 1.0, 3.0, 0.1])),
        sequence=np.int32([0] * 4 + [1] * 4 + [2] * 2),  # the third spreads more, but has two tokens
        advantage=np.float32([1.0] * 10),
        token_text=np.array(list("abcdefghij")),
        flipped=np.int8([0] * 4 + [1, 0, 1, 0] + [-1] * 2),
    )
    found = pick_response(run, (0.2, 0.27), (0.01, 0.015))
    assert [token.text for token in found.tokens] == ["e", "f", "g", "h"]
    assert [token.flipped for token in found.tokens] == [True, False, True, False]
    assert [token.cut for token in found.tokens] == [True, False, False, False]  # 0.5 isn't cut at A > 0
    assert found.sequence_ratio == pytest.approx((1.4 * 0.5) ** 0.25)
    assert not found.sequence_cut and found.step == 10
    spread = spread_of("grpo", [run])
    assert spread.band == (0.2, 0.27)
    assert spread.flipped == 0.25  # of the eight that were compared
    assert spread.token_flipped == pytest.approx((np.log(1.4) + np.log(2)) / 2, abs=1e-6)
    assert len(spread.sequence) == 3


def test_without_ratios_there_is_nothing_to_show(tmp_path):
    run = read_run(write_run(tmp_path / "run", 1, replace(Course(), flips=0.0), steps=5), setting="base", variant="g")
    assert pick_response(run, (0.2, 0.27), (0.01, 0.015)) is None
    assert spread_of("grpo", [run]) is None


def test_a_broken_ratio_file_is_passed_over(tmp_path):
    path = write_run(tmp_path / "run", 1, Course(), steps=20)
    (path / "ratios" / "step_000020.npz").write_bytes(b"PK half")
    (path / "failure.json").write_text(json.dumps({"message": "x"}))
    assert spread_of("grpo", [read_run(path, setting="base", variant="grpo")]) is not None


def test_ratio_files_are_the_runs_in_the_order_of_their_steps(tmp_path):
    arrays = {"log_ratio": np.zeros(1), "sequence": np.int32([0])}
    with RunDirectory(tmp_path / "run") as directory:
        for step in (1_000_000, 999_990):
            directory.write_ratios(step, arrays)
    for name in ("step_000010 (copy).npz", "step_best.npz", "step-000020.npz", "step_000030.npz.bak"):
        (tmp_path / "run" / "ratios" / name).write_bytes(b"")
    (tmp_path / "run" / "ratios" / "step_2000000.npz").mkdir()
    found = ratio_files(read_run(tmp_path / "run", setting="base", variant="grpo"))
    assert [file.name for file in found] == ["step_999990.npz", "step_1000000.npz"]
