"""Layouts against a naive enumeration, and the command line with its refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_gspo.tools.plan.__main__ import main
from tests.support.model_shapes import LARGE, SMALL

QWEN35 = SMALL.parents[2] / "qwen3_5_moe" / "models" / "Qwen3.5-35B-A3B"
BASE = ["--model", str(SMALL), "--gpus", "8", "--gpu", "h200", "--response-length", "8192"]


def test_the_page_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--colocated", "--engine-tensor", "2", "--top", "3"]) == 0
    text = capsys.readouterr().out
    assert "30.5 billion parameters" in text and "| optimizer " in text and "matmul_efficiency" in text
    assert main([*BASE, "--colocated", "--engine-tensor", "2", "--json", "--top", "3"]) == 0
    record = json.loads(capsys.readouterr().out)
    plan = record["plans"][0]
    parts = plan["memory_bytes"]
    total = sum(value for key, value in parts.items() if key not in ("stage", "head", "total"))
    assert parts["total"] == pytest.approx(total)
    assert set(plan["activations_bytes"]) == {"none", "selective", "full"}
    seconds = plan["seconds"]
    assert seconds["total"] == pytest.approx(sum(value for key, value in seconds.items() if key != "total"))
    assert f"tensor_model_parallel_size: {plan['parallel']['tensor_model_parallel_size']}" in text


def test_scale_is_one_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_gspo.tools.plan.__main__.SCALE", (8, 32))
    assert main(["--model", str(SMALL / "config.json"), "--gpu", "h100", "--response-length", "4096", "--scale"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == ["GPUs", "8", "32"]
    assert "100 %" in rows[1]


def test_a_language_model_within_a_model_of_images(capsys: pytest.CaptureFixture[str]) -> None:
    """Its directory and its config.json give the same plan."""
    sizes = ["--gpus", "16", "--gpu", "h200", "--response-length", "4096", "--layout", "EP8"]
    pages = []
    for model in (QWEN35, QWEN35 / "config.json"):
        assert main(["--model", str(model), *sizes]) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1] and "34.7 billion parameters" in pages[0]


def test_the_command() -> None:
    command = [sys.executable, "-m", "megatron_gspo.tools.plan", *BASE, "--gpu", "h300"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2 and answer.stdout == ""
    assert answer.stderr.startswith("error: --gpu h300: ") and answer.stderr.count("\n") == 1


BAD = {
    "--gpu h300": (["--gpu", "h300"], "perhaps h200"),
    "--gpus 12": (["--gpus", "12"], "a multiple"),
    "--gpus 0": (["--gpus", "0"], "give 1 to 8"),
    "--gpus 4": (["--gpus", "4", "--gpu", "h100"], "lacks"),
    "--response-length 60000": (["--response-length", "60000"], "40960 positions"),
    "--response-length 0": (["--response-length", "0"], "at least 1"),
    "--response-length x": (["--response-length", "x"], "invalid int"),
    "--global-batch-size 100": (["--global-batch-size", "100"], "give a divisor"),
    "--lora-targets x": (["--lora-rank", "8", "--lora-targets", "x"], "use some of q_proj"),
    "--lora-rank 8": (["--lora-rank", "8", "--value-model"], "use rehearse"),
    "--engine-tensor 3": (["--engine-tensor", "3"], "give a divisor"),
    "--engine-tensor 1": (["--model", str(LARGE), "--gpu", "h100"], "give at least 8"),
    "--assume speed=2": (["--assume", "speed=2"], "is not an assumption"),
    "--assume matmul_efficiency=x": (["--assume", "matmul_efficiency=x"], "is not a number"),
    "--assume matmul_efficiency=0": (["--assume", "matmul_efficiency=0"], "above 0"),
    "--assume matmul_efficiency=65": (["--assume", "matmul_efficiency=65"], "at most 1, as matmul_efficiency=0.65"),
    "--engine-gpus -8": (["--engine-gpus", "-8"], "give 1 or more"),
    "--layout TP2": (["--layout", "TP2", "--scale"], "leave one of them out"),
    "--assume other_seconds=-1": (["--assume", "other_seconds=-1"], "at least 0"),
    "--layout TP8": (["--layout", "TP8"], "set one of 1, 2, 4"),
    "--layout XX2": (["--layout", "XX2"], "is not a size"),
    "--max-tokens 100": (["--max-tokens", "100"], "give at least 9216"),
    "--model nowhere": (["--model", "nowhere"], "give a Hugging Face model directory"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes, fix = BAD[name]
    assert main([*BASE, *changes]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert name.split()[0] in captured.err and name.split()[1] in captured.err and fix in captured.err


@pytest.mark.parametrize(
    "content, what",
    [
        ("{}", "model_type=None"),
        ("[1]", "not valid JSON"),
        ("x", "not valid JSON"),
        ('{"model_type": "qwen3"}', "lacks the key"),
    ],
)
def test_a_config_that_is_no_model(content: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(content)
    assert main([*BASE, "--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert what in error and error.count("\n") == 1
