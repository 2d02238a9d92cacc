"""A prompt (`Prompt`) and a response to it (`Sample`), the data of a training step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_gspo.errors import describe_value
from megatron_gspo.routing_replay.routes import route_fault

FINISH_REASONS = ("stop", "length", "abort")
_LOG_PROB_FIELDS = ("rollout_log_probs", "old_log_probs", "ref_log_probs")


@dataclass
class Prompt:
    """A tokenised prompt."""

    index: int
    """Position in its source; the group id of its samples."""

    token_ids: np.ndarray
    """[P] int64, P >= 1."""

    text: str
    """The tokenised text, after the chat template."""

    answer: str | None = None
    """Reference answer, or None."""

    metadata: dict[str, Any] = field(default_factory=dict)
    """JSON-able; verifiers get it."""

    source: str = ""
    """Name of its source in `data.sources`; empty without any."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """The row's messages, without the system message of the config; a question is the user's.
    JSON-able."""

    @property
    def length(self) -> int:
        """Tokens in the prompt."""
        return int(self.token_ids.shape[0])

    def check(self) -> None:
        """Raise ValueError (one line) unless the token ids are a non-empty [P] int64 array of
        ids >= 0.
        """
        where = f"prompt {self.index}"
        _check_ids(self.token_ids, where, "token_ids")
        if self.length == 0:
            raise ValueError(
                f"{where}: token_ids is empty; give the model at least one token to start from"
            )


@dataclass
class Sample:
    """One response with its prompt: P prompt tokens, R response tokens, L = P + R.

    prompt_index: `Prompt.index`; the id of the group.
    sample_index: 0 .. n-1 within the group.
    tokens: [L] int64, prompt then response, no padding.
    prompt_length: P >= 1.
    loss_mask: [R] bool; True if the policy generated the token (end token included), False for text
        of an environment.
    rollout_log_probs: [R] float32, log-probability of each response token as the engine scored it
        while sampling (after temperature); None where the engine has none. Ignored where loss_mask
        is False.
    rollout_top_ids, rollout_top_log_probs: [R, K] int32 and float32, the engine's K most likely ids
        at each response token, descending, and their log-probabilities as those of
        rollout_log_probs; None: not asked for.
    support_lengths, support_ids: [R] int32, how many ids the engine could draw at each response
        token, and [sum of them] int32, these ids, token after token; rollout_log_probs are then
        over them. None: the whole vocabulary.
    finish_reason: "stop" (end token), "length" (cut off) or "abort".
    text: the decoded response.
    weight_version: version of the weights that sampled it; the oldest if there are several.
    token_versions: [R] int32, version of the weights that sampled each token (for text of an
        environment: of the response before it); None: all are weight_version. Set by engines whose
        responses can span a weight update.
    reward: NaN until scored.
    advantages, old_log_probs, ref_log_probs: [R] float32, filled in by the trainer.
    values, returns: [R] float32, of the value model before the step's updates and what it is
        trained on (PPO).
    routed_experts: [L-1, layers, k] unsigned, the smallest type that holds the ids
        (`routes.expert_id_dtype`): the experts of each input position in the MoE layers, in model
        order; the last token is not fed.
    missing_routes: [L-1] bool, True where no route is known; None: all are.
    row_lengths: [rows] int64, of a sample whose tokens are several sequences of the model, end to
        end: the branches of an agent's run. The first row has the prompt and all have one ratio,
        one advantage and one weight. The first token of a later row is masked, and the routes of
        a row's last token have no meaning. None: one row of L tokens.
    metadata: JSON-able.
    """

    prompt_index: int
    sample_index: int
    tokens: np.ndarray
    prompt_length: int
    loss_mask: np.ndarray
    rollout_log_probs: np.ndarray | None
    finish_reason: str
    text: str = ""
    weight_version: int = 0
    reward: float = math.nan
    advantages: np.ndarray | None = None
    old_log_probs: np.ndarray | None = None
    ref_log_probs: np.ndarray | None = None
    values: np.ndarray | None = None
    returns: np.ndarray | None = None
    routed_experts: np.ndarray | None = None
    missing_routes: np.ndarray | None = None
    token_versions: np.ndarray | None = None
    row_lengths: np.ndarray | None = None
    rollout_top_ids: np.ndarray | None = None
    rollout_top_log_probs: np.ndarray | None = None
    support_lengths: np.ndarray | None = None
    support_ids: np.ndarray | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """L: prompt and response tokens."""
        return int(self.tokens.shape[0])

    @property
    def has_tokens(self) -> bool:
        """Whether `tokens` are those of the sample and not the placeholder of `stage_input`."""
        return 0 not in self.tokens.strides

    @property
    def response_length(self) -> int:
        """R: response tokens, masked ones included."""
        return self.length - self.prompt_length

    @property
    def response_ids(self) -> np.ndarray:
        """[R] int64 view of the response tokens."""
        return self.tokens[self.prompt_length :]

    @property
    def num_rows(self) -> int:
        """Sequences of the model that the tokens are."""
        return 1 if self.row_lengths is None else len(self.row_lengths)

    def check(self, *, finite: bool = True) -> None:
        """Raise ValueError (one line) unless shapes, dtypes and values are as documented.

        finite=False accepts non-finite log-probs and advantages, for callers that filter and count
        them.
        """
        where = f"sample {self.prompt_index}/{self.sample_index}"
        _check_ids(self.tokens, where, "tokens")
        if not 1 <= self.prompt_length <= self.length:
            raise ValueError(
                f"{where}: prompt_length is {self.prompt_length}; use 1 to {self.length}"
            )
        if self.finish_reason not in FINISH_REASONS:
            known = ", ".join(FINISH_REASONS)
            raise ValueError(
                f"{where}: finish_reason is {self.finish_reason!r}; use one of {known}"
            )
        _check_array(self.loss_mask, (self.response_length,), np.bool_, where, "loss_mask")
        for name in (*_LOG_PROB_FIELDS, "advantages", "values", "returns"):
            self._check_floats(name, where, finite)
        self._check_top_ids(where)
        self._check_support(where)
        self._check_versions(where)
        self._check_rows(where)
        fault = route_fault(self)
        if fault:
            raise ValueError(f"{where}: {fault}")

    def _check_floats(self, name: str, where: str, finite: bool) -> None:
        values = getattr(self, name)
        if values is None:
            return
        _check_array(values, (self.response_length,), np.float32, where, name)
        trained = values[self.loss_mask]
        if not finite:
            return
        bad = int(np.count_nonzero(~np.isfinite(trained)))
        if bad:
            raise ValueError(
                f"{where}: {name} has {bad} non-finite trained values; check the weights"
            )
        if name in _LOG_PROB_FIELDS and trained.size and trained.max() > 1e-3:
            raise ValueError(
                f"{where}: {name} has {trained.max():.4g}; a log-probability is at most 0"
            )

    def _check_top_ids(self, where: str) -> None:
        ids = self.rollout_top_ids
        log_probs = self.rollout_top_log_probs
        if ids is None and log_probs is None:
            return
        count = ids.shape[1] if isinstance(ids, np.ndarray) and ids.ndim == 2 else 1
        shape = (self.response_length, count)
        _check_array(ids, shape, np.int32, where, "rollout_top_ids")
        _check_array(log_probs, shape, np.float32, where, "rollout_top_log_probs")
        assert ids is not None and log_probs is not None
        if ids.size and ids.min() < 0:
            raise ValueError(f"{where}: rollout_top_ids has the negative id {ids.min()}")
        if not (log_probs <= 1e-3).all():  # NaN too
            raise ValueError(
                f"{where}: rollout_top_log_probs has {log_probs.max():.4g}; a log-probability is at"
                " most 0"
            )

    def _check_support(self, where: str) -> None:
        lengths = self.support_lengths
        ids = self.support_ids
        if lengths is None and ids is None:
            return
        _check_array(lengths, (self.response_length,), np.int32, where, "support_lengths")
        assert lengths is not None
        shape = (int(lengths.sum(dtype=np.int64)),)
        _check_array(ids, shape, np.int32, where, "support_ids")
        tokens = np.repeat(np.arange(len(lengths)), lengths)
        is_drawn = ids == self.response_ids[tokens]
        if not np.bincount(tokens[is_drawn], minlength=len(lengths))[self.loss_mask].all():
            raise ValueError(
                f"{where}: support_ids lacks a token of the response; give the ids that could be"
                " drawn at each"
            )

    def _check_versions(self, where: str) -> None:
        versions = self.token_versions
        if versions is None:
            return
        _check_array(versions, (self.response_length,), np.int32, where, "token_versions")
        if versions.size and versions.min() != self.weight_version:
            oldest = f"{versions.min()}, weight_version is {self.weight_version}"
            raise ValueError(
                f"{where}: the oldest of token_versions is {oldest}; weight_version is the oldest"
            )

    def _check_rows(self, where: str) -> None:
        lengths = self.row_lengths
        if lengths is None:
            return
        _check_ids(lengths, where, "row_lengths")
        if not lengths.size or lengths.min() < 1 or lengths.sum() != self.length:
            raise ValueError(
                f"{where}: row_lengths is {lengths.tolist()}; it must be positive numbers with the"
                f" sum {self.length}, the tokens of the sample"
            )
        if lengths[0] < self.prompt_length:
            raise ValueError(
                f"{where}: the first row has {lengths[0]} tokens; it must have the prompt's"
                f" {self.prompt_length}"
            )
        starts = np.cumsum(lengths)[:-1] - self.prompt_length
        if self.loss_mask[starts].any():
            raise ValueError(
                f"{where}: loss_mask is True at the first token of a row, which nothing predicts"
            )

    def to_record(self, prompt: Prompt | None = None) -> dict[str, Any]:
        """A JSON-able dict for the samples/ folder of a run: texts, reward and lengths, no token
        arrays.

        A NaN or infinite reward becomes None, because JSON has no such number.
        """
        record: dict[str, Any] = {
            "prompt_index": int(self.prompt_index),
            "sample_index": int(self.sample_index),
            "reward": json_able(self.reward),
            "finish_reason": self.finish_reason,
            "prompt_length": int(self.prompt_length),
            "response_length": self.response_length,
            "weight_version": int(self.weight_version),
            "response": self.text,
            "metadata": json_able(self.metadata),
        }
        if prompt is not None:
            record["prompt"] = prompt.text
            record["answer"] = prompt.answer
            if prompt.source:
                record["source"] = prompt.source
        if self.token_versions is not None:
            record["token_versions"] = version_spans(self.token_versions)
        return record


def stage_input(sample: Sample, *, tokens: bool) -> Sample:
    """What a pipeline stage without the loss reads of a sample: ids, lengths, `loss_mask` (routing
    metrics weigh by it) and routes; and tokens where it has the embedding, else `tokens` is [L]
    zeros without memory for them.
    """
    return Sample(
        prompt_index=sample.prompt_index,
        sample_index=sample.sample_index,
        tokens=sample.tokens if tokens else np.broadcast_to(np.int64(0), (sample.length,)),
        prompt_length=sample.prompt_length,
        loss_mask=sample.loss_mask,
        rollout_log_probs=None,
        finish_reason=sample.finish_reason,
        routed_experts=sample.routed_experts,
        missing_routes=sample.missing_routes,
        row_lengths=sample.row_lengths,
    )


def version_spans(versions: np.ndarray) -> list[list[int]]:
    """`token_versions` [R] as [version, number of tokens] of each stretch of equal ones, in
    order.
    """
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
    lengths = np.diff(starts, append=len(versions))
    return [
        [version, length]
        for version, length in zip(versions[starts].tolist(), lengths.tolist(), strict=True)
    ]


def json_able(value: Any) -> Any:
    """`value` as `json.dumps` takes it: arrays become lists, sets sorted lists, NaN and inf None.

    Tuples stay tuples (JSON writes them as lists): some tasks compare them with `==`.
    """
    if isinstance(value, Mapping):
        return {str(key): json_able(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_able(item) for item in value]
    if isinstance(value, tuple):
        return tuple(json_able(item) for item in value)
    if isinstance(value, (set, frozenset)):
        return [json_able(item) for item in sorted(value, key=repr)]
    if isinstance(value, np.ndarray):
        return json_able(value.tolist())
    if isinstance(value, np.generic):
        return json_able(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


def _check_ids(ids: object, where: str, name: str) -> None:
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype != np.int64:
        raise ValueError(
            f"{where}: {name} is {describe_value(ids)}; it must be a 1-d int64 numpy array"
        )
    if ids.size and ids.min() < 0:
        raise ValueError(f"{where}: {name} has the negative id {ids.min()}; token ids start at 0")


def _check_array(
    values: object, shape: tuple[int, ...], dtype: type, where: str, name: str
) -> None:
    if not isinstance(values, np.ndarray) or values.dtype != dtype:
        wanted = np.dtype(dtype).name
        raise ValueError(
            f"{where}: {name} is {describe_value(values)}; it must be a {wanted} numpy array"
        )
    if values.shape != shape:
        raise ValueError(
            f"{where}: {name} has shape {values.shape}; the response has {shape[0]} tokens"
        )
