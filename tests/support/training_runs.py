"""Helpers of the training tests: a tiny model with a tokenizer, a config, and runs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file
from torch import Tensor

from megatron_gspo.config import Config
from megatron_gspo.data.sample import Sample
from megatron_gspo.loop.checkpoints import CheckpointManager, LoopState
from megatron_gspo.loop.setup import build_components
from megatron_gspo.loop.timers import Timers
from megatron_gspo.loop.training_loop import train_step
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model
from tests.fault_injection.process_harness import Life, live
from tests.support.random_samples import all_trained_samples

WORD = "Spell this word backward (example: sun -> nus):"


def tiny_model(folder: Path) -> str:
    """A random Qwen3-MoE of a few thousand parameters."""
    write_tiny_model(
        folder, TinyModel(hidden=32, layers=2, experts=4, expert_width=16), words=[WORD]
    )
    return str(folder)


def base_config(model: str, run_dir: Path, /, **sections: Any) -> dict[str, Any]:
    """A small GSPO run; ``sections`` update it, and keys without a section are set."""
    config: dict[str, Any] = {
        "seed": 7,
        "run_dir": str(run_dir),
        "model": {"path": model, "dtype": "float32"},
        "data": {
            "task": {
                "name": "spell_backward",
                "kwargs": {"min_word_len": 3, "max_word_len": 4},
                "size": 200,
                "eval_size": 8,
            },
            "max_prompt_length": 32,
            "verifier": f"{Path(__file__).with_name('spelling_verifier.py')}:score",
            "verifier_timeout": None,
        },
        "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "max_response_length": 6},
        "training": {"steps": 3, "global_batch_size": 8, "max_tokens_per_micro_batch": 96},
        "optimizer": {"lr": 1e-3},
        "tracking": {"plot": False},
    }
    for name, values in sections.items():
        is_section = isinstance(values, Mapping)
        config[name] = {**config.get(name, {}), **values} if is_section else values
    return config


def launch(config: dict[str, Any], processes: int = 1, *overrides: str, check: bool = True) -> Life:
    """The command ``megatron_gspo.train`` on a written config, on each of some ranks."""
    file = Path(config["run_dir"]).with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config))
    folder = Path(tempfile.mkdtemp(dir=file.parent)) / "life"
    life = live(file, folder, processes, None, grace=5.0, overrides=overrides)
    assert not check or life.finished, life.log[-3000:]
    return life


def first_step(
    config: Config, *, engine: RolloutEngine | None = None
) -> tuple[list[Sample], dict[str, float]]:
    """The samples as they are trained on and the metrics of a run's first step, in this
    process's world.
    """
    with build_components(config, engine=engine) as run:
        run.groups.update_weights(run.weights, version=0)
        checkpoints = CheckpointManager(run.policy, config.checkpoint, config.run_dir, None)
        trained = train_step(run, LoopState(), checkpoints, Timers())
    return all_trained_samples(trained.batch), trained.metrics


def exported(run_dir: str | Path) -> dict[str, Tensor]:
    """The weights that a run exported, from any number of files."""
    files = sorted((Path(run_dir) / "hf").glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def records(run_dir: str | Path) -> list[dict[str, Any]]:
    """The run's metrics, without what depends on the clock."""
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "perf/"))}
        for line in lines
    ]


def ledger(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of `rollouts.jsonl`: the samples of each step and what was pending at its end."""
    return [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]


def check_ledger(run_dir: Path, *, batch: int, n: int, staleness: int) -> None:
    """Every sample once, no prompt in two steps, what was drawn is trained on or pending,
    versions as bounded.
    """
    trained: list[int] = []
    for row in ledger(run_dir):
        pairs = [(prompt, sample) for prompt, sample, _, _ in row["samples"]]
        assert len(pairs) == len(set(pairs)) == batch * n
        assert {sample for _, sample in pairs} == set(range(n))
        assert all(
            row["step"] - 1 - staleness <= old <= new <= row["step"] - 1
            for *_, old, new in row["samples"]
        )
        trained += sorted({prompt for prompt, _ in pairs})
        assert not set(trained) & set(row["pending"])
        assert len(trained) + len(row["pending"]) == row["cursor"]
    assert len(trained) == len(set(trained)), "the runs are shorter than an epoch"
