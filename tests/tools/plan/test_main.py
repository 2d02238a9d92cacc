"""The command line: its tables, a real rehearsal, and its refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gspo.tools.plan.__main__ import main
from tests.support.model_shapes import SMALL
from tests.support.tiny_models import tiny_config

QWEN35 = SMALL.parents[2] / "qwen3_5_moe" / "models" / "Qwen3.5-35B-A3B"
BASE = [
    "--model",
    str(SMALL),
    "--gpus",
    "8",
    "--gpu",
    "h200",
    "--response-length",
    "8192",
    "--coarse",
]


def table_of(page: str, heading: str) -> list[list[str]]:
    """The rows of the table whose first column has this heading."""
    [block] = [block for block in page.split("\n\n") if block.startswith(f"| {heading}")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()[2:]]


def test_the_best_layouts_are_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny model on two GPUs: the real step of each layout, with figures of its own."""
    tiny_config().save_pretrained(tmp_path)
    sizes = "--gpus 2 --prompt-length 8 --response-length 8 --global-batch-size 4 --top 3".split()
    assert main(["--model", str(tmp_path), *sizes, "routing.replay=r3"]) == 0
    captured = capsys.readouterr()
    ranked = [row[0] for row in table_of(captured.out, "layout")]
    rehearsed = [row[0] for row in table_of(captured.out, "rehearsed")]
    assert len(ranked) == 3 and set(rehearsed) == set(ranked)
    assert captured.out.count("    parallel.tensor_model_parallel_size=") == 1
    assert "rehearsed rank 0 of " in captured.err


def test_a_language_model_within_a_model_of_images(capsys: pytest.CaptureFixture[str]) -> None:
    """Its directory and its config.json give the same plan."""
    sizes = [
        "--gpus",
        "16",
        "--gpu",
        "h200",
        "--response-length",
        "4096",
        "--layout",
        "EP8",
        "--coarse",
    ]
    pages: list[str] = []
    for model in (QWEN35, QWEN35 / "config.json"):
        assert main(["--model", str(model), *sizes]) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1] and "34.7 billion parameters, 3.5 active" in pages[0]
    assert [row[0] for row in table_of(pages[0], "layout")] == ["EP8"]


BAD = {
    "--gpu h300": (["--gpu", "h300"], "perhaps h200"),
    "--gpus 12": (["--gpus", "12"], "a multiple"),
    "--gpus 4": (["--gpus", "4", "--gpu", "h100"], "comes closest"),
    "--response-length 60000": (["--response-length", "60000"], "40960 positions"),
    "--global-batch-size 0": (["--global-batch-size", "0"], "at least 1"),
    "--efficiency 65": (["--efficiency", "65"], "at most 1"),
    "--layout TP8": (["--layout", "TP8"], "set one of 1, 2, 4"),
    "--model nowhere": (["--model", "nowhere"], "give a Hugging Face model directory"),
    "lora.targets x": (["lora.rank=8", "lora.targets=[x]"], "q_proj"),
    "parallel.tensor_model_parallel_size=2 chooses": (
        ["parallel.tensor_model_parallel_size=2"],
        "--layout",
    ),
    "spare as": (["spare"], "key=value"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes, fix = BAD[name]
    assert main([*BASE, *changes]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert (
        name.split()[0] in captured.err and name.split()[1] in captured.err and fix in captured.err
    )
