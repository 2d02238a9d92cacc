"""What a run tells: metrics.jsonl, samples, progress line, trackers, summary and picture. Only one rank writes."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_gspo.data.sample import Sample
from megatron_gspo.errors import writing
from megatron_gspo.loop.assemble import Run
from megatron_gspo.loop.rollout_buffer import Place
from megatron_gspo.loop.rollouts import ledger
from megatron_gspo.loop.scoring import FAILURE
from megatron_gspo.loop.update import Update, writes_ratios
from megatron_gspo.routing_replay.step_metrics import StepRouting
from megatron_gspo.tracking.plots import draw_run
from megatron_gspo.tracking.progress import Progress
from megatron_gspo.tracking.run_directory import RunDirectory, spread
from megatron_gspo.tracking.run_environment import describe_environment
from megatron_gspo.tracking.trackers import RunInfo, make_trackers


def throughput(samples: Sequence[Sample], times: Mapping[str, float], trained_tokens: float) -> dict[str, float]:
    """The step's times, tokens per second (prompts and responses) and peak memory in GiB.

    ``perf/tokens_per_second`` counts the rollout batch once over the whole step, ``perf/train_tokens_per_second`` every
    pass over it in the time of the updates.
    """
    tokens = sum(sample.length for sample in samples)
    found = {
        **times,
        "perf/tokens": float(tokens),
        "perf/tokens_per_second": tokens / times["time/step"],
        "perf/peak_memory_gib": peak_memory() / 2**30,
    }
    if times.get("time/train"):
        found["perf/train_tokens_per_second"] = trained_tokens / times["time/train"]
    return found


def peak_memory() -> int:
    """Bytes: the GPU's largest allocation, or this process's largest resident size where there is no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def ratio_arrays(done: Update, tokenizer: Any) -> dict[str, np.ndarray]:
    """Of each trained token of an update: ``log_ratio`` f32 (current less old policy, before the update), ``sequence``
    i32 (its place in the mini-batch), ``advantage`` f32, ``token_ids`` i32, ``token_text``, and where it was measured
    ``flipped`` i8 (1: another expert in at least one layer, 0: none, -1: not compared)."""
    masks = [sample.loss_mask for sample in done.samples]
    chosen = list(zip(done.samples, done.log_probs, masks, strict=True))
    ids = np.concatenate([sample.response_ids[mask] for sample, _, mask in chosen]).astype(np.int32)
    texts = {int(i): tokenizer.decode([int(i)]) for i in np.unique(ids)}
    arrays = {
        "log_ratio": np.concatenate([(new - sample.old_log_probs)[mask] for sample, new, mask in chosen]),
        "sequence": np.repeat(np.arange(len(masks)), [int(mask.sum()) for mask in masks]).astype(np.int32),
        "advantage": np.concatenate([sample.advantages[mask] for sample, _, mask in chosen]),
        "token_ids": ids,
        "token_text": np.array([texts[i] for i in ids.tolist()], dtype=np.str_),
    }
    if done.flips is not None:
        arrays["flipped"] = np.concatenate([flips[mask] for flips, mask in zip(done.flips, masks, strict=True)])
    return arrays


class Recorder:
    """The run directory, progress line and trackers on the writing rank; on the others every method does nothing."""

    def __init__(self, run: Run, *, resume_step: int) -> None:
        self._config, self._stack = run.config, contextlib.ExitStack()
        self._active, self._prompts = run.is_writer, run.source.prompts
        self._tokenizer, self._has_ratio = run.tokenizer, run.objective.has_ratio
        self._said: set[str] = set()
        if not self._active:
            return
        tracking, resumed = run.config.tracking, resume_step if resume_step else None
        with writing(run.config.run_dir):
            self._directory = self._stack.enter_context(
                RunDirectory(run.config.run_dir, resume_step=resumed, reuse=run.config.checkpoint.resume == "auto")
            )
            self._directory.write_config(run.config.dump(), describe_environment(world_size=dist.get_world_size()))
        self._trackers = make_trackers(
            RunInfo(Path(run.config.run_dir), run.config.dump(), resumed),
            tensorboard=tracking.tensorboard,
            wandb=tracking.wandb,
            mlflow=tracking.mlflow,
        )
        self._progress = self._stack.enter_context(Progress(run.config.training.steps, start=resume_step))
        if run.dropped_prompts:
            self._progress.say(f"{run.dropped_prompts} prompts are longer than data.max_prompt_length and were dropped")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._active:
            self._trackers.close()
        self._stack.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One record of metrics.jsonl, the trackers and the progress line."""
        if self._active:
            with writing(self._directory.metrics):
                values = self._directory.log(step, metrics)
            self._trackers.log(step, values)
            self._progress.update(step, values)
            if values.get("groups/zero_variance") == 1.0:
                self._say_once(
                    "equal",
                    f"step {step}: the rewards of every group are all equal, so there is nothing to learn from; "
                    "look at samples/ and the verifier",
                )
            if values.get("updates") == 0:
                self._say_once("masked", f"step {step}: every response is masked, so nothing was updated; see masked/*")

    def say(self, line: str) -> None:
        """A line for the reader, beside the progress."""
        if self._active:
            self._progress.say(line)

    def _say_once(self, about: str, line: str) -> None:
        if about not in self._said:
            self._said.add(about)
            self._progress.say(line)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """A few responses of the step, evenly picked; and once a line, if some could not be scored."""
        if self._active and (reasons := [s.metadata[FAILURE] for s in samples if FAILURE in s.metadata]):
            self._say_once(
                "unscored",
                f"step {step}: {len(reasons)} of {len(samples)} responses could not be scored ({reasons[0]}); "
                "see verifier/* and data.verifier_failure_reward",
            )
        if self._active and self._config.tracking.samples_per_step:
            chosen = spread(list(samples), self._config.tracking.samples_per_step)
            with writing(self._directory.samples):
                self._directory.write_samples(
                    step, [sample.to_record(self._prompts[sample.prompt_index]) for sample in chosen]
                )

    def write_routing(self, step: int, routing: StepRouting) -> None:
        """The step's figures by MoE layer, where there are any."""
        record = routing.by_layer()
        if self._active and any(value is not None for value in record.values()):
            with writing(self._directory.routing):
                self._directory.write_routing(step, record)

    def write_rollouts(self, step: int, samples: Sequence[Sample], place: Place) -> None:
        """Prompt, sample and versions of every sample of the step, and what was begun besides; for engines on servers,
        where samples outlive steps."""
        if self._active and self._config.rollout.engine == "sglang":
            with writing(self._directory.rollouts):
                self._directory.write_rollouts(step, ledger(samples, place))

    def write_ratios(self, step: int, done: Update) -> None:
        """Importance ratios of the last update's trained tokens, every ``tracking.ratio_interval`` steps."""
        if self._active and writes_ratios(self._config, step) and self._has_ratio and done.samples:
            with writing(self._directory.ratios):
                self._directory.write_ratios(step, ratio_arrays(done, self._tokenizer))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """summary.json and the picture of the curves; matplotlib's absence is said, not raised."""
        if not self._active:
            return
        with writing(self._directory.summary):
            self._directory.write_summary({**summary, "exit": "finished"})
        if self._config.tracking.plot:
            try:
                draw_run(self._config.run_dir)
            except (ImportError, ValueError, OSError) as error:
                self._progress.say(f"no picture of the curves: {error}")
