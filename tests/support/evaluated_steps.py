"""`megatron-gspo evaluate RUN --steps all` on servers that it starts itself, one after the
other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_gspo.tools.evaluate.__main__ import main
from tests.support.training_runs import base_config, launch, tiny_model


def evaluate_on_own_servers(engine: str, python: str, module: str, folder: Path) -> None:
    """Each step's greedy responses and accuracy are those of the embedded engine, and no server is
    left.

    engine: "sglang" or "vllm". python: an interpreter that has it. module: that its servers run.
    """
    model = tiny_model(folder / "model")
    launch(
        base_config(
            model,
            folder / "run",
            training={"steps": 2},
            optimizer={"lr": 2e-2},
            evaluation={"at_start": False, "at_end": False},
            checkpoint={"save_interval": 1, "keep": 9},
        )
    )
    before = _servers(module)
    embedded = _evaluate(folder / "run", folder / "embedded")
    served = _evaluate(
        folder / "run", folder / engine, f"rollout.engine={engine}", f"{engine}.python={python}"
    )
    assert _servers(module) == before
    assert list(embedded) == list(served) == [1, 2]
    assert embedded[1][0] != embedded[2][0], "the steps must differ"
    for step, (responses, accuracy) in embedded.items():
        assert served[step][0] == responses
        assert served[step][1] == pytest.approx(accuracy, abs=1e-7)  # rewards are float32


def _evaluate(run: Path, output: Path, *settings: str) -> dict[int, tuple[list[str], float]]:
    """By step: the greedy response to each prompt, and the accuracy."""
    assert (
        main(
            [
                str(run),
                "--steps",
                "all",
                "--output",
                str(output),
                "evaluation.temperature=0",
                *settings,
            ]
        )
        == 0
    )
    scores = json.loads((output / "evaluation.json").read_text())["scores"]
    return {each["step"]: (_responses(output, each), each["accuracy"]["mean"]) for each in scores}


def _responses(output: Path, score: dict[str, Any]) -> list[str]:
    (file,) = (output / "responses" / score["label"]).glob("*.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    return [
        record["response"] for record in sorted(records, key=lambda record: record["prompt_index"])
    ]


def _servers(module: str) -> set[int]:
    """Processes below this one that run the module."""
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if child.is_running() and module in child.cmdline()}
