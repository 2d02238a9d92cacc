"""The files that a config names: model, tokenizer, prompts, and what is in the run's directory.
Writes nothing.
"""

from __future__ import annotations

from pathlib import Path

from megatron_gspo.config import Config
from megatron_gspo.errors import show_bytes
from megatron_gspo.models import ModelShape
from megatron_gspo.models.megatron_folders import iteration_folder
from megatron_gspo.tools.doctor.findings import Finding, note, ok, warning
from megatron_gspo.tools.plan.parameters import total_parameters


def check_weights(config: Config) -> tuple[ModelShape, list[Finding]]:
    """The model's sizes and a finding.

    Raises ConfigError for a checkpoint that can't be trained.
    """
    from megatron_gspo.loop import inputs

    shape = inputs.check_weights(config)
    count = total_parameters(shape)
    model = config.model
    path = Path(model.path)
    if model.init == "random":
        return shape, [
            ok("model.weights", f"{path}: {count:,} parameters, drawn at random (model.init)")
        ]
    if model.megatron_path is not None:
        path = iteration_folder(model.megatron_path)
        return shape, [ok("model.weights", f"{path}: {count:,} parameters, read at start")]
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    text = f"{path}: {count:,} parameters, {show_bytes(size)}, every tensor there"
    return shape, [ok("model.weights", text)]


def check_tokenizer_and_prompts(config: Config, shape: ModelShape) -> list[Finding]:
    """Loads both, as every rank of a run does at its start.

    Raises UserError for what can't be used.
    """
    from megatron_gspo.loop import inputs

    tokenizer = inputs.load_tokenizer(config)
    train, held_out, dropped = inputs.load_data(config, tokenizer)
    inputs.check_prompts(config, train, held_out, shape.vocab_size)
    findings = [
        ok("model.tokenizer", f"{type(tokenizer).__name__}, {len(tokenizer):,} tokens"),
        ok("run.prompts", f"{len(train):,} training prompts, {len(held_out):,} held out"),
    ]
    if len(tokenizer) > shape.vocab_size:
        findings[0] = warning(
            "model.tokenizer",
            f"{len(tokenizer):,} tokens, the model's vocabulary has {shape.vocab_size:,}",
            "the last ones can't be embedded",
            "use the model's own tokenizer files",
        )
    if dropped:
        findings.append(
            note(
                "run.prompts",
                f"{dropped:,} prompts are longer than data.max_prompt_length ="
                f" {config.data.max_prompt_length}",
                "they are left out",
                "raise it if they matter",
            )
        )
    return findings


def check_checkpoints(config: Config) -> list[Finding]:
    """Where a run of this config begins: its newest whole checkpoint, and those passed over."""
    # Megatron may be missing.
    from megatron_gspo.mcore.checkpoint.checkpoint_files import newest_checkpoint, read_state

    run_dir = Path(config.run_dir)
    newest, faults = newest_checkpoint(run_dir / "checkpoints")
    judged = [
        warning("run.checkpoints", fault, "it is passed over", "remove it, or keep it to look into")
        for fault in faults
    ]
    if config.checkpoint.resume == "never":
        return judged
    if newest is not None:
        step = read_state(newest).get("step")
        text = f"resumes from {newest}, step {step} of {config.training.steps}"
        if isinstance(step, int) and step >= config.training.steps:
            return [
                *judged,
                note(
                    "run.start",
                    f"{newest} is at step {step} of {config.training.steps}",
                    "there is nothing left to do",
                    "raise training.steps to continue, or choose another run_dir",
                ),
            ]
        return [*judged, ok("run.start", text)]
    if (run_dir / "metrics.jsonl").exists():
        return [
            *judged,
            warning(
                "run.start",
                f"{run_dir} holds the records of a run and no whole checkpoint",
                "a new run starts over and moves them to a folder of their own, earlier_1 and"
                " so on",
                "choose another run_dir to leave them where they are",
            ),
        ]
    return [*judged, ok("run.start", f"{run_dir}: a new run")]
