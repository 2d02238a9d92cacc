"""Half of the loop: batches are written without an update, and trained on without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_gspo.tracking import read_metrics
from tests.support.training_runs import base_config, launch, tiny_model


def records(run_dir: Path) -> list[dict[str, Any]]:
    """The steps' metrics that do not depend on the clock or the machine."""
    varying = ("time/", "perf/tokens_per", "perf/train_tokens", "perf/peak", "perf/generated")
    varying += ("perf/tflops", "perf/log_probs")
    return [
        {name: value for name, value in record.items() if not name.startswith(varying)}
        for record in read_metrics(run_dir)
        if record["step"]
    ]


def test_steps_repeated_from_their_batches_give_the_same_bits(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    batches = str(tmp_path / "batches")
    settings: dict[str, Any] = {"evaluation": {"at_start": False, "at_end": False}}

    def run(name: str, steps: int, **training: Any) -> Path:
        config = base_config(model, tmp_path / name, **settings)
        config["training"] |= {"steps": steps, "batches": batches, **training}
        launch(config)
        return tmp_path / name

    whole = run("whole", 2)
    trained = run("trained", 2, only="train")
    assert records(trained) == records(whole)
    weights = "hf/model.safetensors"
    assert (trained / weights).read_bytes() == (whole / weights).read_bytes()

    before = (Path(batches) / "step_000001" / "rollout.bin").read_bytes()
    (Path(batches) / "step_000001" / "rollout.bin").unlink()
    generated = run("generated", 1, only="rollout")
    assert (Path(batches) / "step_000001" / "rollout.bin").read_bytes() == before
    [record] = records(generated)
    assert record["reward/mean"] == records(whole)[0]["reward/mean"] and "loss" not in record
    assert not (generated / "hf").exists() and any((generated / "samples").iterdir())
