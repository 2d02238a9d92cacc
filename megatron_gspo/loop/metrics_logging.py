"""Metrics and samples are logged here: metrics.jsonl, samples, progress line, trackers, summary
and plot; on rank 0.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

from megatron_gspo.config import Config
from megatron_gspo.data.sample import Prompt
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.errors import writing
from megatron_gspo.loop.earlier_run import WEIGHTS, weights_digest
from megatron_gspo.loop.generation import DataCursor
from megatron_gspo.loop.optimizer_steps import Update, writes_ratios
from megatron_gspo.loop.rollout_log import rollout_record
from megatron_gspo.loop.routing import RoutingReplay
from megatron_gspo.loop.timers import Span
from megatron_gspo.rewards.scorer import FAILURE
from megatron_gspo.terminal import get_logger
from megatron_gspo.tracking.plots import draw_run
from megatron_gspo.tracking.progress import Progress
from megatron_gspo.tracking.run_directory import RunDirectory, evenly_spaced
from megatron_gspo.tracking.run_environment import describe_environment
from megatron_gspo.tracking.timeline import draw_timeline
from megatron_gspo.tracking.trackers import RunInfo, enabled_trackers, make_trackers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)

_TRACKER_SECONDS = 30.0  # that the trackers have at the end for what they have not sent yet
_TRACKER_SECONDS_AT_FAILURE = 10.0  # the other ranks wait
_RATIO_TOKENS = 1 << 18  # of a file of ratios, about: rank 0 collects and sorts them


def ratio_arrays(
    update: Update, tokenizer: PreTrainedTokenizerBase
) -> dict[str, np.ndarray] | None:
    """By trained token of an update: ``log_ratio`` f32 (current less old policy, before the
    update), ``sequence`` i32 (its position in the mini-batch), ``advantage`` f32, ``token_ids``
    i32, ``token_text``, and if measured ``flipped`` i8 (1: another expert in at least one layer, 0:
    none, -1: not compared). Of a mini-batch with more than `_RATIO_TOKENS` trained tokens, those of
    evenly picked sequences, about so many.

    On rank 0, None elsewhere. A collective of the batch's group.
    """
    batch = update.batch
    tokens = int(batch.table["trained"].sum())
    count = max(len(batch) * _RATIO_TOKENS // max(tokens, 1), 1)
    token_ids = np.zeros(0, dtype=np.int32)
    if batch.has_loss:
        token_ids = batch.inputs["tokens"][batch.is_response].astype(np.int32)
    responses = batch.responses.with_column("token_ids", token_ids)
    responses = responses.with_column("log_probs", update.log_probs)
    if update.flips is not None:
        responses = responses.with_column("flipped", update.flips)
    responses = responses.chosen(evenly_spaced(range(len(batch)), count))
    trained = responses["loss_mask"]
    local_arrays = {
        "log_ratio": (responses["log_probs"] - responses["old_log_probs"])[trained],
        "sequence": responses.repeat(responses.positions.astype(np.int32))[trained],
        "advantage": responses["advantages"][trained],
        "token_ids": responses["token_ids"][trained],
    }
    if update.flips is not None:
        local_arrays["flipped"] = responses["flipped"][trained]
    payload = io.BytesIO()
    np.savez(payload, **local_arrays)
    gathered = batch.gather(payload.getbuffer())
    if gathered is None:
        return None
    files = [np.load(io.BytesIO(part.tobytes())) for part in gathered]
    arrays = {name: np.concatenate([file[name] for file in files]) for name in local_arrays}
    order = np.argsort(arrays["sequence"], kind="stable")
    arrays = {name: values[order] for name, values in arrays.items()}
    texts = {int(i): tokenizer.decode([int(i)]) for i in np.unique(arrays["token_ids"])}
    return arrays | {
        "token_text": np.array([texts[i] for i in arrays["token_ids"].tolist()], dtype=np.str_)
    }


class MetricsLogger:
    """The run directory, progress line and trackers on rank 0; on the other ranks every method
    does nothing.
    """

    def __init__(
        self,
        config: Config,
        prompts: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        *,
        resume_step: int,
    ) -> None:
        """A logger of the steps after `resume_step`.

        Args:
            prompts: of the training data, by index.
            resume_step: 0 for a new run.
        """
        self._config = config
        self._stack = contextlib.ExitStack()
        self._active = dist.get_rank() == 0
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._warned: set[str] = set()
        if not self._active:
            return
        resumed = resume_step if resume_step else None
        with writing(config.run_dir):
            self._directory = self._stack.enter_context(
                RunDirectory(
                    config.run_dir, resume_step=resumed, reuse=config.checkpoint.resume == "auto"
                )
            )
            environment = describe_environment(world_size=dist.get_world_size())
            self._directory.write_config(
                config.dump(), {**environment, WEIGHTS: weights_digest(config)}
            )
        self._progress = self._stack.enter_context(
            Progress(config.training.steps, start=resume_step)
        )
        self._trackers = make_trackers(
            RunInfo(Path(config.run_dir), config.dump(), resumed),
            **enabled_trackers(config.tracking),
        )
        if self._directory.earlier is not None:
            logger.warning(
                f"{config.run_dir} held another run and no checkpoint to resume from: its files are"
                f" now in {self._directory.earlier}"
            )
        self._warn_without_checkpoints(resume_step)
        if config.routing.perturbation is not None:
            extent = "" if config.rollout.engine == "embedded" else " of the trainer alone"
            logger.warning(
                f"routing.perturbation: {config.routing.perturbation} changes the choices of the"
                f" routers{extent}"
            )

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, *error: object) -> None:
        if self._active:
            self._trackers.close(_TRACKER_SECONDS_AT_FAILURE if any(error) else _TRACKER_SECONDS)
        self._stack.close()

    def _warn_without_checkpoints(self, resume_step: int) -> None:
        section = self._config.checkpoint
        if section.save_interval or self._config.training.only == "rollout":
            return
        where = f"step {resume_step}" if resume_step else "the beginning"
        line = "checkpoint.save_interval is 0: no checkpoint is written, "
        line += f"a run that is killed starts again from {where}"
        if not section.export_hf:
            line += ", and checkpoint.export_hf is false: the trained weights are not kept"
        logger.warning(line)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One record of metrics.jsonl, the trackers and the progress line."""
        if self._active:
            with writing(self._directory.metrics):
                values = self._directory.log(step, metrics)
            self._trackers.log(step, values)
            self._progress.update(step, values)
            # A teacher's advantages differ within a group.
            equal = values.get("groups/zero_variance") == 1.0
            if equal and not self._config.distillation.is_on:
                self.warn_once(
                    "equal",
                    f"step {step}: the rewards of every group are all equal, so no advantage"
                    " differs from 0; look at samples/ and the verifier",
                )
            if values.get("updates") == 0 and "critic/loss" not in values:  # nor the value model
                line = (
                    f"step {step}: every response is masked, so nothing was updated; see masked/*"
                )
                self.warn_once("masked", line)

    def note_dropped_prompts(self, count: int) -> None:
        """Print how many prompts were too long, if any."""
        if count:
            self.info(f"{count} prompts are longer than data.max_prompt_length and were dropped")

    def info(self, line: str) -> None:
        """Print a line next to the progress."""
        if self._active:
            logger.info(line)

    def info_lines(self, make_lines: Callable[[], Sequence[str]]) -> None:
        """Print lines that are made on rank 0 alone."""
        if self._active:
            for line in make_lines():
                logger.info(line)

    def warn_once(self, about: str, line: str) -> None:
        """Print a line, the first time that there is one about this."""
        if self._active and about not in self._warned:
            self._warned.add(about)
            logger.warning(line)

    def write_step(
        self,
        step: int,
        batch: TrainingBatch,
        routing: RoutingReplay,
        update: Update,
        cursor: DataCursor,
        spans: Sequence[Span] = (),
    ) -> None:
        """What a step writes besides its metrics: its time line, samples, figures by MoE layer,
        importance ratios, rollout log. A collective of the batch's group: rank 0 gets the samples and ratios that it
        writes."""
        self._write_samples(step, batch)
        ratios = None
        if writes_ratios(self._config, step) and routing.has_ratio and len(update.batch):
            ratios = ratio_arrays(update, self._tokenizer)
        if not self._active:
            return
        if spans:
            with writing(self._directory.timeline):
                self._directory.write_timeline(step, spans)
        by_layer = routing.measured.by_layer()
        if any(value is not None for value in by_layer.values()):
            with writing(self._directory.routing):
                self._directory.write_routing(step, by_layer)
        if ratios is not None:
            with writing(self._directory.ratios):
                self._directory.write_ratios(step, ratios)
        if self._config.servers.is_set:  # samples may be older than their step
            with writing(self._directory.rollouts):
                self._directory.write_rollouts(step, rollout_record(batch.table, cursor))

    def _write_samples(self, step: int, batch: TrainingBatch) -> None:
        """Some responses of the step, evenly picked; and one line for the run if some could not
        be scored.
        """
        count = self._config.tracking.samples_per_step
        chosen = evenly_spaced(range(len(batch)), count) if count else []
        records = {
            i: batch.samples[i].to_record(self._prompts[batch.samples[i].prompt_index])
            for i in chosen
            if i in batch.samples
        }
        reasons = [
            sample.metadata[FAILURE]
            for sample in batch.samples.values()
            if FAILURE in sample.metadata
        ]
        gathered = batch.gather(json.dumps([records, len(reasons), reasons[:1]]).encode())
        if not self._active or gathered is None:
            return
        reports = [json.loads(report.tobytes()) for report in gathered]
        if failed := sum(count for _, count, _ in reports):
            reason = next(first[0] for _, _, first in reports if first)
            self.warn_once(
                "unscored",
                f"step {step}: {failed} of {len(batch)} responses could not be scored ({reason}); "
                "see verifier/* and data.verifier_failure_reward",
            )
        if count:
            records = {
                int(i): record
                for local_records, _, _ in reports
                for i, record in local_records.items()
            }
            with writing(self._directory.samples):
                self._directory.write_samples(step, [records[i] for i in chosen])

    def finish(self, summary: Mapping[str, object]) -> None:
        """Write summary.json and plot the curves and the time line; without matplotlib it prints a
        line instead.
        """
        if not self._active:
            return
        with writing(self._directory.summary):
            self._directory.write_summary({**summary, "exit": "finished"})
        if self._config.tracking.plot:
            try:
                draw_run(self._config.run_dir)
                if self._directory.timeline.exists():
                    draw_timeline(self._config.run_dir)
            except (ImportError, ValueError, OSError) as error:
                logger.warning(f"the curves were not plotted: {error}")
