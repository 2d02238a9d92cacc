"""The teachers of on-policy distillation: models in the trainer, and servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from megatron_gspo.config import Config
from megatron_gspo.data.micro_batch_plan import MicroBatchPlan
from megatron_gspo.data.packing import PackedRow
from megatron_gspo.data.sample_batch import BatchTable
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.errors import EngineError, SharedEngineError
from megatron_gspo.loop.step_plan import StepPlan
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.process_groups import ProcessGroups
from megatron_gspo.mcore.train_step import TeacherScores, compute_teacher_scores
from megatron_gspo.parallel.host_exchange import broadcast_along
from megatron_gspo.parallel.rank_zero import run_on_every_rank
from megatron_gspo.rollout.server_engine.scoring_client import ScoringClient
from megatron_gspo.rollout.top_codec import packed_top, unpacked_top


class Teacher(Protocol):
    """Scores the policy's samples."""

    def score(self, batch: TrainingBatch, plan: MicroBatchPlan) -> TeacherScores:
        """Columns of the batch's responses. A collective of the world. plan: of the batch."""
        ...

    def close(self) -> None:
        """Release what is outside the process."""
        ...


class TrainerTeacher:
    """A model in the policy's layout. Its weights are on the device only while it scores."""

    def __init__(self, model: Policy, config: Config, policy: Policy) -> None:
        self._model = model
        self._config = config
        self._policy = policy
        model.memory.release()

    def score(self, batch: TrainingBatch, plan: MicroBatchPlan) -> TeacherScores:
        """See `Teacher.score`."""
        distillation = self._config.distillation
        return compute_teacher_scores(
            self._model,
            batch,
            self._config.training,
            temperature=self._config.rollout.temperature,
            vocab_size=self._policy.shape.vocab_size,
            top_k=distillation.num_ids,
            states_for=self._policy if distillation.takes_all_ids else None,
            plan=plan,
        )

    def close(self) -> None:
        """See `Teacher.close`."""


class ServerTeacher:
    """Servers of the teacher, which the first rank of each replica asks about its samples."""

    def __init__(self, client: ScoringClient, groups: ProcessGroups) -> None:
        self._client = client
        self._groups = groups

    def score(self, batch: TrainingBatch, plan: MicroBatchPlan) -> TeacherScores:
        """See `Teacher.score`. Raises SharedEngineError where the servers do not score the batch."""
        sharing = (self._groups.cp, self._groups.tp)
        is_first = all(group.rank() == 0 for group in sharing)
        num_tokens, top_count = batch.responses.num_tokens, self._client.top_count
        scores = TeacherScores(
            log_probs=np.zeros(num_tokens, dtype=np.float32),
            top_ids=np.zeros((num_tokens, top_count), dtype=np.int32),
            top_log_probs=np.zeros((num_tokens, top_count), dtype=np.float32),
        )

        def ask() -> None:
            try:
                self._fill(scores, batch)
            except EngineError as error:
                raise SharedEngineError(str(error)) from error

        run_on_every_rank(ask if batch.has_loss and is_first else lambda: None)
        if not batch.has_loss or all(group.size() == 1 for group in sharing):
            return scores
        sent = broadcast_along(packed_scores(scores) if is_first else None, sharing)
        return scores if is_first else unpacked_scores(sent, num_tokens, top_count)

    def close(self) -> None:
        """See `Teacher.close`."""
        self._client.close()

    def _fill(self, scores: TeacherScores, batch: TrainingBatch) -> None:
        rows = list(_rows(batch))
        sequences = [
            batch.inputs.of_sample("tokens", row.sample)[row.offset : row.offset + row.length]
            for row in rows
        ]
        log_probs = batch.responses.split(scores.log_probs)
        top_ids = batch.responses.split(scores.top_ids)
        top_log_probs = batch.responses.split(scores.top_log_probs)
        for row, scored in zip(rows, self._client.score(sequences), strict=True):
            predicted = row.predicted(int(batch.table["prompt_length"][row.sample]))
            log_probs[row.sample][predicted.response] = scored.log_probs[predicted.packed]
            if scored.top_ids is not None and scored.top_log_probs is not None:
                top_ids[row.sample][predicted.response] = scored.top_ids[predicted.packed]
                of_top = scored.top_log_probs[predicted.packed]
                top_log_probs[row.sample][predicted.response] = of_top


def packed_scores(scores: TeacherScores) -> np.ndarray:
    """[bytes] uint8: 4 bytes of each token, and 6 or 8 of each most likely id with its log-prob
    (`packed_top`)."""
    first, second = packed_top(scores.top_ids.ravel(), scores.top_log_probs.ravel())
    return np.concatenate([part.view(np.uint8) for part in (scores.log_probs, first, second)])


def unpacked_scores(packed: np.ndarray, num_tokens: int, top_count: int) -> TeacherScores:
    """The inverse of `packed_scores`, of arrays [num_tokens] and [num_tokens, top_count]."""
    count = num_tokens * top_count
    log_probs, first, second = np.split(packed, [4 * num_tokens, 4 * (num_tokens + count)])
    half = np.dtype(np.uint32 if len(second) == 4 * count else np.uint16)
    ids, top_log_probs = unpacked_top(first.view(np.uint32), second.view(half))
    return TeacherScores(
        log_probs=log_probs.view(np.float32).copy(),
        top_ids=ids.reshape(num_tokens, top_count),
        top_log_probs=top_log_probs.reshape(num_tokens, top_count),
    )


class Teachers:
    """The teachers of a run by their names; the only one is ""."""

    def __init__(self, teachers: Mapping[str, Teacher], chosen: np.ndarray | None = None) -> None:
        """chosen: [prompts], the position among ``teachers`` of each prompt's; None: there is one."""
        self._teachers = dict(teachers)
        self._chosen = chosen

    @property
    def names(self) -> list[str]:
        """The names of the teachers; empty for a single one."""
        return [] if self._chosen is None else list(self._teachers)

    def numbers(self, batch: BatchTable) -> np.ndarray:
        """[N]: the position of each sample's teacher among the teachers."""
        if self._chosen is None:
            return np.zeros(len(batch), dtype=np.int32)
        return self._chosen[batch.table["prompt_index"]]

    def score(self, batch: TrainingBatch, plan: StepPlan) -> TeacherScores:
        """Columns of the batch's responses, each of its prompt's teacher. A collective of the
        world. plan: of the step that trains the batch."""
        if self._chosen is None:
            [only] = self._teachers.values()
            return only.score(batch, plan.first_epoch)
        numbers = self.numbers(batch)
        parts: list[tuple[np.ndarray, TeacherScores]] = []
        for number, teacher in enumerate(self._teachers.values()):
            positions = np.flatnonzero(numbers == number)
            if len(positions):
                part = batch.select(positions)
                scores = teacher.score(part, plan.of_samples(batch, positions.tolist()))
                parts.append((np.isin(batch.responses.positions, positions), scores))
        return _joined(batch, parts)

    def close(self) -> None:
        """Release what is outside the process."""
        for teacher in self._teachers.values():
            teacher.close()


def _joined(
    batch: TrainingBatch, parts: Sequence[tuple[np.ndarray, TeacherScores]]
) -> TeacherScores:
    """parts: which [n] of the batch's responses, and their scores, end to end."""

    def column(name: str) -> np.ndarray:
        first = getattr(parts[0][1], name)
        values = np.zeros((batch.responses.num_tokens, *first.shape[1:]), dtype=first.dtype)
        for chosen, scores in parts:
            values[batch.responses.repeat(chosen)] = getattr(scores, name)
        return values

    return TeacherScores(column("log_probs"), column("top_ids"), column("top_log_probs"))


def _rows(batch: TrainingBatch) -> Iterator[PackedRow]:
    """The sequences of the batch's samples, each where it would be alone in a micro-batch."""
    for position in batch.responses.positions.tolist():
        offset = 0
        for length in batch.rows.of_sample("length", position).tolist():
            yield PackedRow(position, offset, start=0, length=length)
            offset += length
