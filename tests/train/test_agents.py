"""Whole runs whose samples are runs of agents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.training_runs import base_config, launch, records, tiny_model

ROOT = Path(__file__).parents[2]
EXAMPLE = f"{ROOT}/examples/agents/spell_backward.py:spell_backward"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def agent_config(model: str, run_dir: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    agents = {"function": EXAMPLE, "max_calls": 4, "max_context": 80} | sections.pop("agents", {})
    config = base_config(model, run_dir, agents=agents, **sections)
    config["data"]["verifier"] = None
    return config


def test_a_run_on_the_example(model: str, tmp_path: Path) -> None:
    config = agent_config(
        model,
        tmp_path / "run",
        parallel={"expert_model_parallel_size": 2},
        training={"steps": 2},
        tracking={"samples_per_step": 16, "plot": False},
    )
    launch(config, 2)
    rows = records(config["run_dir"])
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["agents/rows"] == 16 and row["masked/unscored"] == 0
        assert row["agents/calls"] == 16 * row["turns/mean"]
        assert 1 < row["turns/mean"] <= row["turns/max"] <= 3
        assert row["updates"] == 2
        # every generated token is scored as it was sampled
        assert row["mismatch/abs_diff_max"] < 1e-4
    assert "eval/accuracy" in rows[-1]
    lines = (Path(config["run_dir"]) / "samples" / "step_000001.jsonl").read_text().splitlines()
    for sample in map(json.loads, lines):
        messages = sample["metadata"]["messages"]
        assert messages[0]["role"] == "user" and messages[-1]["role"] == "assistant"
        assert len(sample["metadata"]["turns"]) == sum(m["role"] == "assistant" for m in messages)
