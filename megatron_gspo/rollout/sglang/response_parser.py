"""What a server says about one response, checked before anything else sees it.

A server is another program, perhaps another version, perhaps behind a proxy: lengths, types, ranges and versions are
proved here, and nothing that it sends is unpickled.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_gspo.data.sample import FINISH_REASONS
from megatron_gspo.errors import EngineError
from megatron_gspo.routing_replay.routes import RouteShape

_TOKEN_BYTES = 512  # of one output token in an answer: id, log-prob and its text, up to 128 characters in a vocabulary
_FIXED_BYTES = 64 * 1024


class AnswerError(EngineError):
    """An answer that can't be used; one line that names the request, what was found and what was expected."""


@dataclass(frozen=True)
class Asked:
    """One request, as far as its answer is checked against it.

    name: begins the errors. context: tokens sent, prompt and what was generated before. max_new_tokens: at most so
    many come back. vocab_size: ids are below it. version: the weights that must have answered. routes: sizes of the
    routes asked for, or None; a server sends a row of [model layers, k] int32 for each input token, dense layers
    included. routes_start: first input position that a row was asked for.
    """

    name: str
    context: int
    max_new_tokens: int
    vocab_size: int
    version: str
    stop_ids: frozenset[int] = frozenset()
    routes: RouteShape | None = None
    routes_start: int = 0

    @property
    def route_rows(self) -> int:
        """Most rows of routes that an answer may have: all fed positions from routes_start on."""
        return self.context + self.max_new_tokens - 1 - self.routes_start

    @property
    def max_bytes(self) -> int:
        """A bound on the answer's size."""
        routes = 0 if self.routes is None else self.route_rows * self.routes.model_layers * self.routes.k * 16 // 3
        return _FIXED_BYTES + self.max_new_tokens * _TOKEN_BYTES + routes


@dataclass(frozen=True)
class Part:
    """A piece of a response, all of one version of the weights.

    tokens: [r] int64; log_probs: [r] float32; finish_reason: one of FINISH_REASONS ("abort": there may be more to
    come). routes: [context + r - 1 - routes_start, moe layers, k] int32, or None. cached: prompt tokens that the server
    had computed before.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    finish_reason: str
    routes: np.ndarray | None
    cached: int


def parse_answer(answer: Any, asked: Asked) -> Part:
    """The checked answer to a /generate request. Raises `AnswerError`.

    A wrong weight version is no fault of the answer: see `answered_version`, which the caller asks first.
    """
    meta = _meta(answer, asked)
    reason = _finish_reason(meta, asked)
    tokens, log_probs = _tokens(meta.get("output_token_logprobs"), asked)
    ids = answer.get("output_ids")
    if ids is not None and (not _are_integers(ids) or ids != tokens.tolist()):
        raise AnswerError(f"{asked.name}: output_ids and output_token_logprobs disagree about the tokens")
    count = len(tokens)
    if count > asked.max_new_tokens:
        raise AnswerError(f"{asked.name}: {count} tokens came back, at most {asked.max_new_tokens} were asked for")
    if reason == "length" and count != asked.max_new_tokens:
        raise AnswerError(f"{asked.name}: cut off for its length after {count} of {asked.max_new_tokens} tokens")
    if reason == "stop" and (not count or (asked.stop_ids and int(tokens[-1]) not in asked.stop_ids)):
        last = int(tokens[-1]) if count else "nothing"
        raise AnswerError(f"{asked.name}: stopped on {last}, which is no end token ({sorted(asked.stop_ids)})")
    routes = None if asked.routes is None else _routes(meta.get("routed_experts"), count, asked)
    cached = meta.get("cached_tokens")
    if not _are_integers([cached]) or not 0 <= cached <= asked.context:  # a statistic: no reason to refuse the answer
        cached = 0
    return Part(tokens, log_probs, reason, routes, cached)


def is_empty(answer: Any, asked: Asked) -> bool:
    """Whether a request was stopped before its first token, as one that was aborted in a server's queue; such an
    answer says nothing else."""
    return _finish_reason(_meta(answer, asked), asked) == "abort" and not answer.get("output_ids")


def answered_version(answer: Any, asked: Asked) -> str:
    """The weight version that an answer names. Raises `AnswerError` where it names none, or several."""
    meta = _meta(answer, asked)
    version = meta.get("weight_version")
    if not isinstance(version, str):
        raise AnswerError(f"{asked.name}: the answer names no weight_version")
    spans = meta.get("weight_versions") or []
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        raise AnswerError(f"{asked.name}: weight_versions is {_shown(spans)}, not a list of spans")
    for span in spans:
        if span.get("version") != version and span.get("start") != span.get("end"):
            change = f"from {_shown(span.get('version'))} to {_shown(version)}"
            raise AnswerError(f"{asked.name}: the weights changed {change} within it")
    return version


def input_log_probs(answer: Any, asked: Asked, tokens: Sequence[int]) -> np.ndarray:
    """[len(tokens) - 1] float32: the server's log-probs of tokens[1:], from an answer with logprob_start_len=0."""
    rows = _meta(answer, asked).get("input_token_logprobs")
    if not isinstance(rows, list) or len(rows) != len(tokens):
        found = len(rows) if isinstance(rows, list) else type(rows).__name__
        raise AnswerError(f"{asked.name}: input_token_logprobs has {found} entries for {len(tokens)} tokens")
    ids, log_probs = _pairs(rows[1:], asked)
    if ids.tolist() != list(tokens[1:]):
        raise AnswerError(f"{asked.name}: input_token_logprobs is of other tokens than were sent")
    return log_probs


def _meta(answer: Any, asked: Asked) -> dict[str, Any]:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise AnswerError(f"{asked.name}: the answer has no meta_info")
    return meta


def _finish_reason(meta: dict[str, Any], asked: Asked) -> str:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind not in FINISH_REASONS:
        raise AnswerError(f"{asked.name}: finish_reason is {_shown(reason)}; expected one of {FINISH_REASONS}")
    return kind


def _shown(value: Any) -> str:
    """A value of a server's in a message: one line, short."""
    try:
        return repr(value)[:80]
    except RecursionError:
        return f"a deep {type(value).__name__}"


def _are_integers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)  # True is no integer here


def _tokens(rows: Any, asked: Asked) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(rows, list):
        raise AnswerError(f"{asked.name}: output_token_logprobs is a {type(rows).__name__}, not a list")
    ids, log_probs = _pairs(rows, asked)
    if len(ids) and (ids.min() < 0 or ids.max() >= asked.vocab_size):
        wrong = ids[(ids < 0) | (ids >= asked.vocab_size)][0]
        raise AnswerError(f"{asked.name}: token id {wrong} came back; the vocabulary has {asked.vocab_size}")
    return ids, log_probs


def _pairs(rows: list[Any], asked: Asked) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [n] int64 and log-probs [n] float32 of SGLang's [[log-prob, id, text], ...]."""
    if not all(isinstance(row, list) and len(row) > 1 and type(row[0]) in (float, int) for row in rows):
        raise AnswerError(f"{asked.name}: the log-probs are not rows of [number, token id]")
    ids = [row[1] for row in rows]
    try:
        with np.errstate(over="ignore"):  # found below, as an infinity
            log_probs = np.array([row[0] for row in rows], dtype=np.float32)
    except OverflowError:
        raise AnswerError(f"{asked.name}: the log-probs are not rows of [number, token id]") from None
    if not _are_integers(ids) or any(not -1 < token < 2**31 for token in ids):
        raise AnswerError(f"{asked.name}: a token id is no integer of the vocabulary")
    if not np.isfinite(log_probs).all() or (log_probs > 0).any():
        wrong = log_probs[~np.isfinite(log_probs) | (log_probs > 0)][0]
        raise AnswerError(f"{asked.name}: the log-prob {wrong} came back; they are finite and at most 0")
    return np.array(ids, dtype=np.int64), log_probs


def _routes(encoded: Any, count: int, asked: Asked) -> np.ndarray:
    shape = asked.routes
    assert shape is not None
    if not isinstance(encoded, str):
        hint = "start the server with --enable-return-routed-experts; a router in front may drop them"
        raise AnswerError(f"{asked.name}: no routed_experts came back; {hint}")
    try:
        ids = np.frombuffer(base64.b64decode(encoded, validate=True), dtype="<i4")
    except (binascii.Error, ValueError):
        raise AnswerError(f"{asked.name}: routed_experts is not base64 of int32") from None
    rows = max(asked.context + count - 1 - asked.routes_start, 0)
    if ids.size != rows * shape.model_layers * shape.k:
        wanted = f"{rows} rows x {shape.model_layers} layers x {shape.k}"
        raise AnswerError(f"{asked.name}: routed_experts holds {ids.size} ids, not {wanted}")
    ids = ids.reshape(rows, shape.model_layers, shape.k)[:, list(shape.moe_layer_indices)]
    if ids.size and (ids.min() < 0 or ids.max() >= shape.num_experts):
        raise AnswerError(f"{asked.name}: routed_experts has expert {ids.min() if ids.min() < 0 else ids.max()}; "
                          f"the model has 0 to {shape.num_experts - 1}")
    return ids
