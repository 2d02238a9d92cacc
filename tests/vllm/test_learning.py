"""Training on responses of a vLLM server reaches the accuracy of the embedded engine, from one cold
start.

A shorter `examples/qwen3_moe/compare_engines.yaml`, whose long results docs/engines.md has. All
runs use one server, which starts with other weights than theirs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_gspo.tools.compare.__main__ import run_all
from megatron_gspo.tools.compare.cold_start import prepare
from megatron_gspo.tools.compare.statistics import interval
from megatron_gspo.tools.compare.study import differences, read_study, values
from megatron_gspo.tools.compare.study_plan import ColdStartFiles, load_comparison
from tests.vllm.conftest import StartServers

EXAMPLE = Path(__file__).parents[2] / "examples" / "qwen3_moe" / "compare_engines.yaml"
SEEDS = [1, 2, 3, 4]
STEPS = 20


def write_comparison(folder: Path, urls: list[str]) -> Path:
    """The example with fewer seeds and steps, and vLLM at these URLs."""
    given: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    given |= {"folder": str(folder), "seeds": SEEDS, "base": str(EXAMPLE.with_name(given["base"]))}
    given["cold_start"]["config"] = str(EXAMPLE.with_name(given["cold_start"]["config"]))
    given["overrides"] |= {"training.steps": STEPS, "evaluation.eval_interval": STEPS}
    served = next(variant for variant in given["variants"] if variant["name"] == "vllm")[
        "overrides"
    ]
    del served["vllm.num_servers"], served["vllm.python"]
    served["vllm.urls"] = urls
    file = folder / "comparison.yaml"
    file.write_text(yaml.safe_dump(given))
    return file


@pytest.mark.slow
def test_vllm_reaches_the_accuracy_of_the_embedded_engine(
    start_servers: StartServers, tmp_path: Path
) -> None:
    """Over the seeds: the 95 % interval of the paired difference has 0 in it, and is narrow enough
    to exclude the loss of half of what the embedded engine gains. Both gain beyond doubt."""
    prepare(load_comparison(write_comparison(tmp_path, ["http://127.0.0.1:1"])))
    server = start_servers(count=1, model=str(ColdStartFiles(tmp_path).model))
    comparison = load_comparison(write_comparison(tmp_path, server.urls))
    run_all(comparison, slots=1)  # two runs at once would send the server each other's weights
    server.stop()
    study = read_study(comparison, "")
    start, end = (
        {name: values(study, name, measure) for name in ("embedded", "vllm")}
        for measure in ("start_accuracy", "final_accuracy")
    )
    gains = {
        name: interval([end[name][seed] - start[name][seed] for seed in SEEDS]) for name in end
    }
    assert all(gain.low > 0.05 for gain in gains.values()), gains
    difference = differences(study, "final_accuracy")["vllm"]
    assert difference.count == len(SEEDS)
    assert -gains["embedded"].mean / 2 < difference.low < 0 < difference.high, difference
