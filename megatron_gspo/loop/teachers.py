"""The teachers of on-policy distillation: a model in the trainer, or servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from megatron_gspo.config import Config
from megatron_gspo.data.packing import PackedRow
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.errors import EngineError, SharedEngineError
from megatron_gspo.loop.step_plan import StepPlan
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.process_groups import ProcessGroups
from megatron_gspo.mcore.train_step import TeacherScores, compute_teacher_scores
from megatron_gspo.parallel.host_exchange import broadcast_array
from megatron_gspo.parallel.rank_zero import run_on_every_rank
from megatron_gspo.rollout.server_engine.scoring_client import ScoringClient


class Teacher(Protocol):
    """Scores the policy's samples."""

    def score(self, batch: TrainingBatch, plan: StepPlan) -> TeacherScores:
        """Columns of the batch's responses. A collective of the world."""
        ...

    def close(self) -> None:
        """Release what is outside the process."""
        ...


class TrainerTeacher:
    """A model in the policy's layout. Its weights are on the device only while it scores."""

    def __init__(self, model: Policy, config: Config, vocab_size: int) -> None:
        """vocab_size: of the policy."""
        self._model = model
        self._config = config
        self._vocab_size = vocab_size
        model.memory.release()

    def score(self, batch: TrainingBatch, plan: StepPlan) -> TeacherScores:
        """See `Teacher.score`."""
        return compute_teacher_scores(
            self._model,
            batch,
            self._config.training,
            temperature=self._config.rollout.temperature,
            vocab_size=self._vocab_size,
            top_k=self._config.distillation.top_k,
            plan=plan.first_epoch,
        )

    def close(self) -> None:
        """See `Teacher.close`."""


class ServerTeacher:
    """Servers of the teacher, which the first rank of each replica asks about its samples."""

    def __init__(self, client: ScoringClient, groups: ProcessGroups) -> None:
        self._client = client
        self._groups = groups

    def score(self, batch: TrainingBatch, plan: StepPlan) -> TeacherScores:
        """See `Teacher.score`. Raises SharedEngineError where the servers do not score the batch."""
        groups = self._groups
        asks = batch.has_loss and groups.tp.rank() == 0 and groups.cp.rank() == 0
        log_probs = np.zeros(batch.responses.num_tokens, dtype=np.float32)

        def ask() -> None:
            try:
                self._fill(log_probs, batch)
            except EngineError as error:
                raise SharedEngineError(str(error)) from error

        run_on_every_rank(ask if asks else lambda: None)
        if batch.has_loss:
            for group in (groups.cp, groups.tp):
                if group.size() > 1:
                    log_probs = broadcast_array(log_probs, group, 0)
        nothing = np.zeros((len(log_probs), 0), dtype=np.float32)
        return TeacherScores(log_probs, top_ids=nothing.astype(np.int32), top_log_probs=nothing)

    def close(self) -> None:
        """See `Teacher.close`."""
        self._client.close()

    def _fill(self, log_probs: np.ndarray, batch: TrainingBatch) -> None:
        rows = list(_rows(batch))
        sequences = [
            batch.inputs.of_sample("tokens", row.sample)[row.offset : row.offset + row.length]
            for row in rows
        ]
        views = batch.responses.split(log_probs)
        for row, scores in zip(rows, self._client.score(sequences), strict=True):
            predicted = row.predicted(int(batch.table["prompt_length"][row.sample]))
            views[row.sample][predicted.response] = scores[predicted.packed]


def _rows(batch: TrainingBatch) -> Iterator[PackedRow]:
    """The sequences of the batch's samples, each where it would be alone in a micro-batch."""
    for position in batch.responses.positions.tolist():
        offset = 0
        for length in batch.rows.of_sample("length", position).tolist():
            yield PackedRow(position, offset, start=0, length=length)
            offset += length
