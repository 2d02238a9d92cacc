"""Checks that the responses of all kinds of servers share.

A server is another program, perhaps of another version, perhaps behind a proxy: lengths, types and
ranges are validated, and nothing that it sends is unpickled.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
import numpy as np

from megatron_gspo.data.sample import FINISH_REASONS
from megatron_gspo.rollout.engine_protocol import too_many_ids
from megatron_gspo.rollout.server_engine.server_api import RequestContext, ResponseError

T = TypeVar("T")

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


def decoded(
    decoder: msgspec.json.Decoder[T], body: bytes | bytearray, context: RequestContext
) -> T:
    """The body of a response.

    Raises `ResponseError` for what is not JSON and for values of other types.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise ResponseError(f"{context.name}: the response has another form: {error}") from None
    except (msgspec.DecodeError, ValueError, RecursionError):  # ValueError: not UTF-8
        raise ResponseError(
            f"{context.name}: the response is not JSON ({len(body)} bytes)"
        ) from None


def checked_reason(reason: object, received: object, context: RequestContext) -> str:
    """A finish reason; `received` is what the message shows. Raises `ResponseError`."""
    if not isinstance(reason, str) or reason not in FINISH_REASONS:
        raise ResponseError(
            f"{context.name}: finish_reason is {shown(received)}; expected one of {FINISH_REASONS}"
        )
    return reason


def checked_tokens(ids: list[int], context: RequestContext) -> np.ndarray:
    """[n] int64 below the vocabulary's size. Raises `ResponseError`."""
    tokens = np.frombuffer(array("q", ids), np.int64)
    _check_ids(tokens, context)
    return tokens


def _check_ids(ids: np.ndarray, context: RequestContext) -> None:
    vocab_size = context.model.vocab_size
    if ids.max(initial=0) >= vocab_size:
        wrong = ids[ids >= vocab_size][0]
        raise ResponseError(
            f"{context.name}: token id {wrong} came back; the vocabulary has {vocab_size}"
        )


def checked_log_probs(values: Sequence[float], context: RequestContext) -> np.ndarray:
    """[n] float32, finite and at most 0. Raises `ResponseError`."""
    with np.errstate(over="ignore"):  # found below, as an infinity
        log_probs = np.frombuffer(array("d", values), np.float64).astype(np.float32)
    if not np.isfinite(log_probs).all() or (log_probs > 0).any():
        wrong = log_probs[~np.isfinite(log_probs) | (log_probs > 0)][0]
        raise ResponseError(
            f"{context.name}: the log-prob {wrong} came back; it must be finite and at most 0"
        )
    return log_probs


def checked_top(
    rows: Sequence[Sequence[tuple[float, int]]], count: int, context: RequestContext
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """([n, K] int32, [n, K] float32) of (log-prob, id) of the K most likely ids at each of `count`
    tokens; None where none were requested. Raises `ResponseError`."""
    wanted = context.top_count
    if not wanted:
        return None, None
    fewest = min(map(len, rows), default=wanted)
    if len(rows) != count or fewest < wanted:
        raise ResponseError(
            f"{context.name}: log-probs of {fewest} ids at {len(rows)} of {count} tokens came back;"
            f" {wanted} ids were asked for"
        )
    entries = [entry for row in rows for entry in row[:wanted]]
    ids = checked_tokens([token for _, token in entries], context).astype(np.int32)
    log_probs = checked_log_probs([log_prob for log_prob, _ in entries], context)
    return ids.reshape(count, wanted), log_probs.reshape(count, wanted)


def checked_support(
    rows: Sequence[Sequence[int]], tokens: np.ndarray, context: RequestContext
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(lengths [n] int32, ids int32 end to end) of the ids that could be drawn at each of `tokens`
    [n]; None where they were not requested.

    Raises `ResponseError`, and `EngineError` for more ids than `rollout.max_support`.
    """
    if not context.max_support:
        return None, None
    if len(rows) != len(tokens):
        raise ResponseError(
            f"{context.name}: the ids that could be drawn came back at {len(rows)} of"
            f" {len(tokens)} tokens"
        )
    lengths = np.fromiter(map(len, rows), np.int32, len(rows))
    if lengths.max(initial=0) > context.max_support:
        raise too_many_ids(context.max_support)
    ids = np.fromiter(itertools.chain.from_iterable(rows), np.int32, int(lengths.sum()))
    _check_ids(ids, context)
    numbers = np.repeat(np.arange(len(rows)), lengths)
    is_drawn = ids == tokens[numbers]
    if not np.bincount(numbers[is_drawn], minlength=len(rows)).all():
        raise ResponseError(
            f"{context.name}: a token is not among the ids that could be drawn there"
        )
    return lengths, ids


def check_end(tokens: np.ndarray, reason: str, context: RequestContext) -> None:
    """Raise `ResponseError` unless the number of tokens and the last one agree with the finish
    reason.
    """
    count = len(tokens)
    limit = context.max_new_tokens
    stop_ids = context.model.stop_ids
    if count > limit:
        raise ResponseError(
            f"{context.name}: {count} tokens came back, at most {limit} were requested"
        )
    if reason == "length" and count != limit:
        raise ResponseError(
            f"{context.name}: cut off for its length after {count} of {limit} tokens"
        )
    if reason == "stop" and (not count or (stop_ids and int(tokens[-1]) not in stop_ids)):
        last = int(tokens[-1]) if count else "nothing"
        raise ResponseError(
            f"{context.name}: stopped on {last}, which is not an end token ({sorted(stop_ids)})"
        )


def cached_tokens(value: object, context: RequestContext) -> int:
    """A number of cached input tokens; 0 for an invalid one, since it is only a statistic."""
    return value if type(value) is int and 0 <= value <= context.context_length else 0


def single_version(version: object, spans: object, context: RequestContext) -> str:
    """The weight version of a response. spans: [{version, start, end}] of its tokens, or nothing;
    an empty span does not count. Raises `ResponseError` for no version, or several."""
    if not isinstance(version, str):
        raise ResponseError(f"{context.name}: the response has no weight_version")
    spans = spans or []
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        raise ResponseError(
            f"{context.name}: weight_versions is {shown(spans)}, not a list of spans"
        )
    for span in spans:
        if span.get("version") != version and span.get("start") != span.get("end"):
            change = f"from {shown(span.get('version'))} to {shown(version)}"
            raise ResponseError(f"{context.name}: the weights changed {change} within it")
    return version


def shown(value: object) -> str:
    """A value in an error message: one line, short."""
    try:
        return repr(value)[:80]
    except RecursionError:
        return f"a deep {type(value).__name__}"
