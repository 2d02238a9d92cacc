"""The batch of a training step on the replicas that train it: a row of numbers for each response
on every rank, and the tokens of this replica's responses as columns.

The phases of a step add columns. Nothing is copied where mini-batches and micro-batches are
selected: they read slices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch.distributed as dist

from megatron_gspo.data.columns import Columns
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.sample_batch import BatchTable, rows_of
from megatron_gspo.data.turn_spans import spans
from megatron_gspo.parallel.collectives import group_rank, group_size
from megatron_gspo.parallel.host_exchange import broadcast_array, broadcast_bytes, exchange_bytes
from megatron_gspo.parallel.host_memory import return_free_memory
from megatron_gspo.routing_replay.routes import route_fault

# Fields of a sample that become columns of its response, [R] float32.
_FLOAT_FIELDS = (
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "advantages",
    "values",
    "returns",
)
# The same, [R, K] of their dtypes.
_TOP_FIELDS = {"rollout_top_ids": np.int32, "rollout_top_log_probs": np.float32}
# Of samples, which are given back to the system together once they were copied.
_RETURNED_BYTES = 64 << 20
_NO_TOKENS = Columns.of([], np.zeros(0, dtype=np.int64))
# On stages of a pipeline without the loss.
_NO_RESPONSES = Columns.of(
    [],
    np.zeros(0, dtype=np.int64),
    loss_mask=np.zeros(0, dtype=np.bool_),
    generated=np.zeros(0, dtype=np.bool_),
    token_versions=np.zeros(0, dtype=np.int32),
    **{name: np.zeros(0, dtype=np.float32) for name in _FLOAT_FIELDS},
)
_NO_ROWS = Columns.of([], np.zeros(0, dtype=np.int64), length=np.zeros(0, dtype=np.int64))
_NO_SUPPORTS = Columns.of([], np.zeros(0, dtype=np.int64), ids=np.zeros(0, dtype=np.int32))
_NO_TURNS = Columns.of(
    [],
    np.zeros(0, dtype=np.int64),
    start=np.zeros(0, dtype=np.int64),
    end=np.zeros(0, dtype=np.int64),
    reward=np.zeros(0),
)


@dataclass(frozen=True)
class TrainingBatch(BatchTable):
    """N responses, of which this rank's replica trains n.

    inputs: of prompts and responses, what a model is fed: `tokens` int64 (of a pipeline only on
        stages that read them); `trained` bool, whether the token is in the loss; with routes
        `routed_experts` [tokens, layers, k] and `missing_routes` bool (the row of a response's last
        token, which is not fed, has no meaning).
    responses: of responses alone: `loss_mask` bool; `generated` bool, False for text of an
        environment; `rollout_log_probs`, `old_log_probs`, `ref_log_probs`, `advantages`, `values`
        and `returns` float32, `token_versions` int32, as far as a phase has added them; of a
        teacher `teacher_log_probs` float32, and of its K most likely ids `teacher_top_ids` int32
        and `teacher_top_log_probs` float32 [tokens, K]; of the rollout engine `rollout_top_ids` and
        `rollout_top_log_probs`, and `centering_advantages` float32; of a truncated sampler
        `support_lengths` int32. Without samples on stages of a pipeline
        that don't have the loss.
    rows: a value for each sequence of the model that a sample is: its `length` in tokens. All
        samples have one row but runs of agents.
    supports: of a truncated sampler, a value for each id that could be drawn, response token after
        response token: `ids` int32.
    turns: of episodes, a value for each turn: `start` and `end` within the response, `reward`.
    samples: the responses as the rollout made them, without routes, for what a step writes; on
        ranks with the loss.
    pipeline: the stages of a replica where only the last one has `responses`. None: every stage
        has them.
    """

    inputs: Columns = _NO_TOKENS
    responses: Columns = _NO_RESPONSES
    rows: Columns = _NO_ROWS
    supports: Columns = _NO_SUPPORTS
    turns: Columns = _NO_TURNS
    samples: Mapping[int, Sample] = field(default_factory=dict)
    pipeline: dist.ProcessGroup | None = field(default=None, compare=False)

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> TrainingBatch:
        """Samples that this process holds, with what they have of the columns.

        Raises ValueError for samples of which only some have a field.
        """
        for name in _FLOAT_FIELDS:
            lacking = [sample for sample in samples if getattr(sample, name) is None]
            if lacking and len(lacking) < len(samples):
                raise ValueError(
                    f"{name} is missing from {len(lacking)} of {len(samples)} samples (first:"
                    f" sample {lacking[0].prompt_index}/{lacking[0].sample_index}); fill it in for"
                    " all or for none"
                )
        builder = TrainingBatchBuilder(rows_of(samples), range(len(samples)))
        for position, sample in enumerate(samples):
            builder.add(position, sample)
        return builder.batch()

    @property
    def has_loss(self) -> bool:
        """Whether this rank's stage of the pipeline has the loss."""
        return self.pipeline is None or group_rank(self.pipeline) == group_size(self.pipeline) - 1

    @property
    def is_response(self) -> np.ndarray:
        """A column of `inputs`, bool: whether a token is of the response."""
        response_lengths = self.table["response_length"][self.inputs.positions]
        prompt_lengths = self.inputs.lengths - response_lengths
        lengths = np.stack([prompt_lengths, response_lengths], axis=1).ravel()
        return np.repeat(np.tile([False, True], len(self.inputs)), lengths)

    @property
    def response_tokens(self) -> np.ndarray:
        """A column of `responses`, int64: the tokens."""
        if not self.has_loss:
            return np.zeros(0, dtype=np.int64)
        return self.inputs["tokens"][self.is_response]

    def select(self, positions: Sequence[int] | np.ndarray) -> TrainingBatch:
        """The responses at these positions, in this order."""
        positions = np.asarray(positions, dtype=np.int64)
        responses = self.responses.renumbered(positions)
        local_positions = positions[responses.positions].tolist()
        samples = {
            new: self.samples[old]
            for new, old in zip(responses.positions.tolist(), local_positions, strict=True)
            if old in self.samples
        }
        return replace(
            self,
            table=self.table[positions],
            inputs=self.inputs.renumbered(positions),
            rows=self.rows.renumbered(positions),
            supports=self.supports.renumbered(positions),
            responses=responses,
            turns=self.turns.renumbered(positions),
            samples=samples,
        )

    def with_column(self, name: str, values: np.ndarray) -> TrainingBatch:
        """A value for each token of `responses`, end to end."""
        return replace(self, responses=self.responses.with_column(name, values))

    def with_loss_mask(self, loss_mask: np.ndarray) -> TrainingBatch:
        """Other tokens in the loss: [T] bool of `responses`. The table counts them, and the other
        stages of a pipeline get them. A collective of the replicas."""
        batch = self.with_column("loss_mask", loss_mask)
        table = self.table.copy()
        table["trained"] = batch.shared(batch.responses.sums(loss_mask))
        trained = np.zeros(self.inputs.num_tokens, dtype=np.bool_)
        is_response = self.is_response
        if self.pipeline is not None:
            last = group_size(self.pipeline) - 1
            sent = broadcast_bytes(np.packbits(loss_mask), self.pipeline, last)
            loss_mask = np.unpackbits(sent, count=int(is_response.sum())).view(np.bool_)
        trained[is_response] = loss_mask
        return replace(batch, table=table, inputs=self.inputs.with_column("trained", trained))

    def with_routes(self, recorded: Columns) -> TrainingBatch:
        """The `routed_experts` of some samples in place of all routes; the others' are missing."""
        routes = recorded["routed_experts"]
        if len(recorded) == len(self.inputs):
            missing = np.zeros(len(routes), dtype=np.bool_)
        else:
            # Pages that nobody writes to take no memory.
            everything = np.zeros((self.inputs.num_tokens, *routes.shape[1:]), dtype=routes.dtype)
            missing = np.ones(self.inputs.num_tokens, dtype=np.bool_)
            known = np.zeros(len(self.inputs), dtype=np.bool_)
            known[np.searchsorted(self.inputs.positions, recorded.positions)] = True
            is_known = self.inputs.repeat(known)
            everything[is_known] = routes
            missing[is_known] = False
            routes = everything
        inputs = self.inputs.with_column("routed_experts", routes)
        return replace(self, inputs=inputs.with_column("missing_routes", missing))

    def shared(self, values: np.ndarray) -> np.ndarray:
        """[N] float64 on every rank from a number for each sample of `responses` [n].

        A collective of the replicas.
        """
        column = np.zeros(len(self))
        column[self.responses.positions] = values
        return self.summed(column)

    def _reduced(
        self,
        reduce: Callable[[np.ndarray, dist.ProcessGroup | None], np.ndarray],
        values: np.ndarray,
    ) -> np.ndarray:
        reduced = reduce(values, self.group) if self.has_loss else values
        if self.pipeline is None:
            return reduced
        return broadcast_array(reduced, self.pipeline, group_size(self.pipeline) - 1)

    def gather(self, payload: bytes | memoryview) -> list[np.ndarray] | None:
        """Every replica's bytes on the world's rank 0; None elsewhere. A collective of the
        replicas.
        """
        if self.pipeline is not None:  # to the first stage
            last = group_size(self.pipeline) - 1
            sent = exchange_bytes({0: payload} if self.has_loss else {}, [(last, 0)], self.pipeline)
            payload = sent[last].data if sent else b""
        return super().gather(payload)


class TrainingBatchBuilder:
    """Makes a `TrainingBatch` of samples that arrive one after the other, in any order.

    The columns are allocated at once and a sample's arrays are copied into them. A sample's memory
    goes back to the system once it was added, so that the samples and their columns do not exist
    twice.
    """

    def __init__(
        self,
        table: np.ndarray,
        positions: Sequence[int] | np.ndarray,
        *,
        has_loss: bool = True,
        has_tokens: bool = True,
    ) -> None:
        """A batch without samples.

        Args:
            table: of the batch.
            positions: ascending, of the samples that will be added.
            has_loss, has_tokens: False on stages of a pipeline without the loss, and without the
                embedding.
        """
        rows = table[np.asarray(positions, dtype=np.int64)]
        response_lengths = rows["response_length"].astype(np.int64)
        self._table = table
        self._inputs = Columns.of(positions, rows["prompt_length"] + response_lengths)
        self._responses = Columns.of(positions, response_lengths)
        self._rows = Columns.of(positions, rows["rows"])
        self._row_lengths = np.empty(self._rows.num_tokens, dtype=np.int64)
        self._turns = Columns.of(positions, rows["turns"])
        self._has_loss = has_loss
        self._samples: dict[int, Sample] = {}
        tokens = self._inputs.num_tokens
        self._input_arrays = {"trained": np.zeros(tokens, dtype=np.bool_)}
        if has_tokens:
            self._input_arrays["tokens"] = np.empty(tokens, dtype=np.int64)
        self._added = 0
        self._copied_bytes = 0  # of routes, which are nearly all of a sample
        self._with_top_ids = 0
        self._support_ids: dict[int, np.ndarray] = {}
        self._response_arrays: dict[str, np.ndarray] = {}
        self._turn_arrays: dict[str, np.ndarray] = {}
        if has_loss:
            tokens = self._responses.num_tokens
            self._response_arrays = {
                "loss_mask": np.empty(tokens, dtype=np.bool_),
                "generated": np.empty(tokens, dtype=np.bool_),
            }
            if table["has_versions"].any():
                self._response_arrays["token_versions"] = np.empty(tokens, dtype=np.int32)
            turns = self._turns.num_tokens
            self._turn_arrays = {
                "start": np.empty(turns, dtype=np.int64),
                "end": np.empty(turns, dtype=np.int64),
                "reward": np.empty(turns, dtype=np.float64),
            }

    def add(self, position: int, sample: Sample) -> None:
        """Copy the sample's arrays into the columns.

        Raises ValueError for arrays that aren't of the sample's tokens.
        """
        self._added += 1
        index = int(np.searchsorted(self._inputs.positions, position))
        start = int(self._inputs.starts[index])
        inputs = slice(start, start + sample.length)
        response = slice(start + sample.prompt_length, start + sample.length)
        first_row = int(self._rows.starts[index])
        self._row_lengths[first_row : first_row + sample.num_rows] = (
            sample.length if sample.row_lengths is None else sample.row_lengths
        )
        self._input_arrays["trained"][response] = sample.loss_mask
        if "tokens" in self._input_arrays:
            self._input_arrays["tokens"][inputs] = sample.tokens
        if sample.routed_experts is not None:
            self._add_routes(sample, start)
        if self._has_loss:
            self._add_response(position, sample, inputs, index)

    def _add_routes(self, sample: Sample, start: int) -> None:
        name = f"sample {sample.prompt_index}/{sample.sample_index}"
        if fault := route_fault(sample):
            raise ValueError(f"{name}: {fault}")
        routes = sample.routed_experts
        assert routes is not None
        if "routed_experts" not in self._input_arrays:
            tokens = self._inputs.num_tokens
            self._input_arrays["routed_experts"] = np.zeros(
                (tokens, *routes.shape[1:]), dtype=routes.dtype
            )
            self._input_arrays["missing_routes"] = np.zeros(tokens, dtype=np.bool_)
        column = self._input_arrays["routed_experts"]
        if routes.shape[1:] != column.shape[1:] or routes.dtype != column.dtype:
            raise ValueError(
                f"{name}: routed_experts is {routes.dtype} of shape {list(routes.shape)}; other"
                f" samples have {column.dtype} {['tokens - 1', *column.shape[1:]]}"
            )
        rows = slice(start, start + sample.length - 1)
        column[rows] = routes
        if sample.missing_routes is not None:
            self._input_arrays["missing_routes"][rows] = sample.missing_routes
        self._copied_bytes += routes.nbytes
        if self._copied_bytes >= _RETURNED_BYTES:
            return_free_memory()
            self._copied_bytes = 0

    def _add_response(self, position: int, sample: Sample, inputs: slice, index: int) -> None:
        start = int(self._responses.starts[index])
        response = slice(start, start + sample.response_length)
        arrays = self._response_arrays
        arrays["loss_mask"][response] = sample.loss_mask
        turns = spans(sample)
        arrays["generated"][response] = not turns
        for number, turn in enumerate(turns, start=int(self._turns.starts[index])):
            arrays["generated"][start + turn.start : start + turn.end] = True
            self._turn_arrays["start"][number] = turn.start
            self._turn_arrays["end"][number] = turn.end
            self._turn_arrays["reward"][number] = turn.reward
        if "token_versions" in arrays:
            versions = sample.token_versions
            arrays["token_versions"][response] = (
                sample.weight_version if versions is None else versions
            )
        for name in _FLOAT_FIELDS:
            values = getattr(sample, name)
            if values is None:
                continue
            if values.shape != (sample.response_length,):
                raise ValueError(
                    f"sample {sample.prompt_index}/{sample.sample_index}: a per-token field has"
                    f" shape {list(values.shape)}; the response has"
                    f" {sample.response_length} tokens"
                )
            if name not in arrays:
                arrays[name] = np.empty(self._responses.num_tokens, dtype=np.float32)
            arrays[name][response] = values
        if sample.rollout_top_ids is not None:
            self._add_top_ids(sample, response)
        if sample.support_ids is not None:
            self._support_ids[position] = sample.support_ids
            if "support_lengths" not in arrays:
                tokens = self._responses.num_tokens
                arrays["support_lengths"] = np.zeros(tokens, dtype=np.int32)
            arrays["support_lengths"][response] = sample.support_lengths
        versions = sample.token_versions
        # Its arrays are views of the columns: the originals' memory is free.
        self._samples[position] = replace(
            sample,
            tokens=self._input_arrays["tokens"][inputs],
            loss_mask=arrays["loss_mask"][response],
            token_versions=None if versions is None else arrays["token_versions"][response],
            rollout_log_probs=None,
            rollout_top_ids=None,
            rollout_top_log_probs=None,
            support_lengths=None,
            support_ids=None,
            old_log_probs=None,
            ref_log_probs=None,
            advantages=None,
            values=None,
            returns=None,
            routed_experts=None,
            missing_routes=None,
        )

    def _supports(self) -> Columns:
        if not self._support_ids:
            return _NO_SUPPORTS
        arrays = dict(sorted(self._support_ids.items()))
        lengths = np.array([len(ids) for ids in arrays.values()], dtype=np.int64)
        return Columns.of(list(arrays), lengths, ids=np.concatenate(list(arrays.values())))

    def _add_top_ids(self, sample: Sample, response: slice) -> None:
        """response: its tokens in the columns."""
        self._with_top_ids += 1
        for name, dtype in _TOP_FIELDS.items():
            values = getattr(sample, name)
            column = self._response_arrays.get(name)
            if column is None:
                sizes = (self._responses.num_tokens, values.shape[1])
                column = self._response_arrays[name] = np.empty(sizes, dtype=dtype)
            if values.shape != (sample.response_length, column.shape[1]):
                raise ValueError(
                    f"sample {sample.prompt_index}/{sample.sample_index}: {name} has shape"
                    f" {list(values.shape)}; it must be"
                    f" {[sample.response_length, column.shape[1]]}"
                )
            column[response] = values

    def batch(
        self, group: dist.ProcessGroup | None = None, pipeline: dist.ProcessGroup | None = None
    ) -> TrainingBatch:
        """The batch of all samples, without rollout log-probs or routes that only some of them
        have.

        Args:
            group, pipeline: of the batch, see `TrainingBatch`.
        """
        assert self._added == len(self._inputs), f"{self._added} of {len(self._inputs)} arrived"
        if self._with_top_ids not in (0, self._added):
            raise ValueError(
                f"rollout_top_ids is missing from {self._added - self._with_top_ids} of"
                f" {self._added} samples; fill it in for all or for none"
            )
        if len(self._support_ids) not in (0, self._added):
            raise ValueError(
                f"support_ids is missing from {self._added - len(self._support_ids)} of"
                f" {self._added} samples; fill it in for all or for none"
            )
        if not self._table["has_rollout_log_probs"].all():
            self._response_arrays.pop("rollout_log_probs", None)
        if not self._table["has_routes"].all():
            self._input_arrays.pop("routed_experts", None)
            self._input_arrays.pop("missing_routes", None)
        responses = replace(self._responses, arrays=self._response_arrays)
        turns = replace(self._turns, arrays=self._turn_arrays)
        return TrainingBatch(
            self._table,
            group,
            inputs=replace(self._inputs, arrays=self._input_arrays),
            rows=replace(self._rows, arrays={"length": self._row_lengths}),
            responses=responses if self._has_loss else _NO_RESPONSES,
            supports=self._supports(),
            turns=turns if self._has_loss else _NO_TURNS,
            samples=dict(sorted(self._samples.items())),
            pipeline=pipeline,
        )
