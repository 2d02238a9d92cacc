"""The shipped configs of the large models fit, by the plan, into the GPUs of their names."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_gspo.config import load_config
from megatron_gspo.tools.plan.assumptions import Assumptions
from megatron_gspo.tools.plan.hardware import find_gpu
from megatron_gspo.tools.plan.layer_sizes import Setting
from megatron_gspo.tools.plan.memory import stage_states, worst_memory
from megatron_gspo.tools.plan.step_time import micro_batches
from megatron_gspo.tools.plan.workload import Cluster, PlanInputs, Workload
from tests.support.model_shapes import LARGE, SMALL, shape_of

FOLDER = Path(__file__).parents[3] / "examples" / "qwen3_moe"
CONFIGS = sorted(file.name for file in FOLDER.glob("qwen3_*.yaml"))


def processes(text: str) -> int:
    """Of the line "# processes: N" that the configs carry."""
    return int(next(line for line in text.splitlines() if line.startswith("# processes:")).split(":")[1])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_shipped_config_fits(name: str) -> None:
    file = FOLDER / name
    text = file.read_text()
    gpus = processes(text)
    config = load_config(file)
    shape = shape_of(LARGE if "235b" in name else SMALL)
    colocated = bool((yaml.safe_load(text).get("sglang") or {}).get("colocated"))
    cluster = Cluster(find_gpu("h200" if "141gb" in name else "h100"), gpus, "colocated" if colocated else "none")
    rollout, training = config.rollout, config.training
    work = Workload(
        rollout.max_response_length, config.data.max_prompt_length, rollout.rollout_batch_size,
        rollout.n_samples_per_prompt, training.global_batch_size, routes=config.routing.replay != "none",
        lora=config.trained_lora,
    )  # fmt: skip
    tokens = training.max_tokens_per_micro_batch
    mean = work.global_batch_size / config.parallel.data_parallel_size(gpus) * work.mean_length(1.0)
    memory = worst_memory(
        PlanInputs(shape, work, cluster, Assumptions()), config.parallel,
        stage_states(shape, config.parallel, gpus, 2, work.lora), tokens, micro_batches(mean, tokens, config.parallel),
        Setting(2, "torch" if work.lora else "transformer_engine", config.model.recompute_granularity, lora=work.lora),
    )  # fmt: skip
    assert memory.total < cluster.gpu.memory, memory
    assert memory.optimizer > (0.02 if work.lora else 0.2) * memory.total


def test_there_are_configs() -> None:
    assert len(CONFIGS) >= 6
