"""Parses and validates SGLang's responses to /generate.

A server is another program, perhaps of another version, perhaps behind a proxy: lengths, types, ranges and versions are
validated here, and nothing that it sends is unpickled.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_gspo.data.sample import FINISH_REASONS
from megatron_gspo.rollout.server_engine.server_api import RequestContext, ResponseError, ResponsePart

_TOKEN_BYTES = 512  # of one output token in a response: id, log-prob and its text, up to 128 characters in a vocabulary
_FIXED_BYTES = 64 * 1024


def max_response_bytes(context: RequestContext) -> int:
    """A bound on the size of a response in bytes."""
    routes = 0
    if context.model.return_routes:
        shape = context.model.shape
        routes = context.route_rows * len(shape.moe_layers) * shape.experts_per_token * 16 // 3
    return _FIXED_BYTES + context.max_new_tokens * _TOKEN_BYTES + routes


def parse_response(response: Any, context: RequestContext) -> ResponsePart:
    """The validated response to a /generate request. Raises `ResponseError`.

    The weight version is not compared: see `response_version`, which the caller checks first.
    """
    meta = _meta(response, context)
    reason = _finish_reason(meta, context)
    tokens, log_probs = _tokens(meta.get("output_token_logprobs"), context)
    ids = response.get("output_ids")
    if ids is not None and (not _are_integers(ids) or ids != tokens.tolist()):
        raise ResponseError(f"{context.name}: output_ids and output_token_logprobs disagree about the tokens")
    count, limit, stop_ids = len(tokens), context.max_new_tokens, context.model.stop_ids
    if count > limit:
        raise ResponseError(f"{context.name}: {count} tokens came back, at most {limit} were requested")
    if reason == "length" and count != limit:
        raise ResponseError(f"{context.name}: cut off for its length after {count} of {limit} tokens")
    if reason == "stop" and (not count or (stop_ids and int(tokens[-1]) not in stop_ids)):
        last = int(tokens[-1]) if count else "nothing"
        raise ResponseError(f"{context.name}: stopped on {last}, which is not an end token ({sorted(stop_ids)})")
    routes = _routes(meta.get("routed_experts"), count, context) if context.model.return_routes else None
    cached: Any = meta.get("cached_tokens")
    if not _are_integers([cached]) or not 0 <= cached <= context.context_length:  # only a statistic
        cached = 0
    return ResponsePart(tokens, log_probs, reason, routes, cached)


def is_empty(response: Any, context: RequestContext) -> bool:
    """Whether a request was aborted before its first token, as in a server's queue. Such a response has nothing else.

    Raises `ResponseError`.
    """
    return _finish_reason(_meta(response, context), context) == "abort" and not response.get("output_ids")


def response_version(response: Any, context: RequestContext) -> str:
    """The weight version of a response. Raises `ResponseError` for none or several."""
    meta = _meta(response, context)
    version = meta.get("weight_version")
    if not isinstance(version, str):
        raise ResponseError(f"{context.name}: the response has no weight_version")
    spans = meta.get("weight_versions") or []
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        raise ResponseError(f"{context.name}: weight_versions is {_shown(spans)}, not a list of spans")
    for span in spans:
        if span.get("version") != version and span.get("start") != span.get("end"):
            change = f"from {_shown(span.get('version'))} to {_shown(version)}"
            raise ResponseError(f"{context.name}: the weights changed {change} within it")
    return version


def parse_input_log_probs(response: Any, context: RequestContext, tokens: Sequence[int]) -> np.ndarray:
    """[len(tokens) - 1] float32: the server's log-probs of tokens[1:], from a response to logprob_start_len=0.

    Raises `ResponseError`.
    """
    rows = _meta(response, context).get("input_token_logprobs")
    if not isinstance(rows, list) or len(rows) != len(tokens):
        found = len(rows) if isinstance(rows, list) else type(rows).__name__
        raise ResponseError(f"{context.name}: input_token_logprobs has {found} entries for {len(tokens)} tokens")
    ids, log_probs = _pairs(rows[1:], context)
    if ids.tolist() != list(tokens[1:]):
        raise ResponseError(f"{context.name}: input_token_logprobs is of other tokens than were sent")
    return log_probs


def _meta(response: Any, context: RequestContext) -> dict[str, Any]:
    meta = response.get("meta_info") if isinstance(response, dict) else None
    if not isinstance(meta, dict):
        raise ResponseError(f"{context.name}: the response has no meta_info")
    return meta


def _finish_reason(meta: dict[str, Any], context: RequestContext) -> str:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind not in FINISH_REASONS:
        raise ResponseError(f"{context.name}: finish_reason is {_shown(reason)}; expected one of {FINISH_REASONS}")
    return kind


def _shown(value: Any) -> str:
    """A value in an error message: one line, short."""
    try:
        return repr(value)[:80]
    except RecursionError:
        return f"a deep {type(value).__name__}"


def _are_integers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)  # bool is a subclass of int


def _tokens(rows: Any, context: RequestContext) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(rows, list):
        raise ResponseError(f"{context.name}: output_token_logprobs is a {type(rows).__name__}, not a list")
    ids, log_probs = _pairs(rows, context)
    vocab_size = context.model.vocab_size
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ResponseError(f"{context.name}: token id {wrong} came back; the vocabulary has {vocab_size}")
    return ids, log_probs


def _pairs(rows: list[Any], context: RequestContext) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [n] int64 and log-probs [n] float32 of SGLang's [[log-prob, id, text], ...]."""
    if not all(isinstance(row, list) and len(row) > 1 and type(row[0]) in (float, int) for row in rows):
        raise ResponseError(f"{context.name}: the log-probs are not rows of [number, token id]")
    ids = [row[1] for row in rows]
    try:
        with np.errstate(over="ignore"):  # found below, as an infinity
            log_probs = np.array([row[0] for row in rows], dtype=np.float32)
    except OverflowError:
        raise ResponseError(f"{context.name}: the log-probs are not rows of [number, token id]") from None
    if not _are_integers(ids) or any(not -1 < token < 2**31 for token in ids):
        raise ResponseError(f"{context.name}: a token id is not an integer of the vocabulary")
    if not np.isfinite(log_probs).all() or (log_probs > 0).any():
        wrong = log_probs[~np.isfinite(log_probs) | (log_probs > 0)][0]
        raise ResponseError(f"{context.name}: the log-prob {wrong} came back; it must be finite and at most 0")
    return np.array(ids, dtype=np.int64), log_probs


def _routes(encoded: Any, count: int, context: RequestContext) -> np.ndarray:
    """[rows, MoE layers, k] int32. SGLang sends [rows, num_layers, k] int32 in base64, dense layers included."""
    shape = context.model.shape
    num_layers, k = len(shape.moe_layers), shape.experts_per_token
    if not isinstance(encoded, str):
        hint = "start the server with --enable-return-routed-experts; a router in front may drop them"
        raise ResponseError(f"{context.name}: no routed_experts came back; {hint}")
    try:
        ids = np.frombuffer(base64.b64decode(encoded, validate=True), dtype="<i4")
    except (binascii.Error, ValueError):
        raise ResponseError(f"{context.name}: routed_experts is not base64 of int32") from None
    rows = max(context.context_length + count - 1 - context.routes_start, 0)
    if ids.size != rows * num_layers * k:
        wanted = f"{rows} rows x {num_layers} layers x {k}"
        raise ResponseError(f"{context.name}: routed_experts holds {ids.size} ids, not {wanted}")
    ids = ids.reshape(rows, num_layers, k)[:, [layer for layer, is_moe in enumerate(shape.moe_layers) if is_moe]]
    if ids.size and (ids.min() < 0 or ids.max() >= shape.num_experts):
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ResponseError(
            f"{context.name}: routed_experts has expert {wrong}; the model has 0 to {shape.num_experts - 1}"
        )
    return ids
