"""The command on a tiny model: real rehearsals of all ranks, the files that it writes, and its
exit codes.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_gspo.tools.rehearse.__main__ import main
from tests.support.tiny_models import tiny_config

EXAMPLE = str(Path(__file__).parents[3] / "examples" / "qwen3_moe" / "tiny_gspo.yaml")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_config().save_pretrained(folder)  # config.json: a rehearsal reads no weights
    return str(folder)


@pytest.fixture(scope="module")
def rehearsed(model, tmp_path_factory):
    """Two pipeline stages of two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("rehearsed")
    file = folder / "rehearsal.json"
    code = main(
        [
            EXAMPLE,
            f"model.path={model}",
            "model.dtype=bfloat16",
            "parallel.pipeline_model_parallel_size=2",
            "--world",
            "4",
            "--ranks",
            "all",
            "--jobs",
            "2",
            "--json",
            str(file),
        ]
    )
    return SimpleNamespace(code=code, document=json.loads(file.read_text()))


def test_a_layout_passes(rehearsed):
    assert rehearsed.document["problems"] == []
    assert rehearsed.code == 0 and rehearsed.document["passes"]


def test_every_group_of_the_ranks_was_compared(rehearsed):
    compared = rehearsed.document["compared_groups"]
    assert {"tp", "ep", "pp", "world"} <= set(compared)
    assert (
        compared["tp"]["groups"] == 2
        and compared["tp"]["members"] == 4
        and compared["tp"]["calls"] > 20
    )


def test_the_document_has_every_rank(rehearsed):
    roles = rehearsed.document["roles"]
    assert [role["rank"] for role in roles] == [0, 1, 2, 3]
    assert [role["roles"][0] for role in roles] == ["first stage"] * 2 + ["last stage"] * 2
    for role in roles:
        assert 0 < role["peak_activation_bytes"] < role["peak_bytes"] and role["seconds"] > 0
        assert {collective["group"] for collective in role["collectives"]} >= {"tp", "ep", "pp"}
        assert all(collective["count"] > 0 for collective in role["collectives"])
        assert all(":" in sync["where"][0] and sync["count"] > 0 for sync in role["host_syncs"])
        assert set(role["phase_peaks"]) >= {
            "old_log_probs",
            "forward_backward",
            "optimizer",
            "weight_export",
        }


def test_the_document_tells_the_time(rehearsed):
    """Each phase's seconds are those of its operations."""
    for role in rehearsed.document["roles"]:
        times = role["times"]
        assert set(times) == {"old_log_probs", "forward_backward", "optimizer"}
        for phase, of_phase in times.items():
            seconds = [op["seconds"] for op in role["ops"] if op["phase"] == phase]
            assert seconds and of_phase["ops"]["seconds"] == pytest.approx(sum(seconds))
            assert of_phase["communication"] > 0 and of_phase["host"] > 0


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--world", "0"], "--world 0: must be at least 1"),
        (["--world", "4", "--imbalance", "0.5"], "--imbalance 0.5: must be at least 1"),
        (["--world", "4", "--gpu", "abacus"], "--gpu abacus: not a known GPU"),
        (["--world", "4", "--ranks", "4"], "no rank 4 in a world of 4"),
        (["--world", "3"], "does not divide 3 processes"),
        (["--world", "4", "optimizer.pace=1"], "optimizer.pace"),
        (["--world", "x"], "see --help"),
        ([], "--world"),
    ],
)
def test_invalid_input_is_one_line(model, arguments, says, capsys):
    assert main([EXAMPLE, f"model.path={model}", *arguments]) == 2
    printed = capsys.readouterr()
    assert says in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_a_config_that_is_missing_is_one_line(capsys):
    assert main(["nowhere.yaml", "--world", "4"]) == 2
    assert "cannot read the config" in capsys.readouterr().err
