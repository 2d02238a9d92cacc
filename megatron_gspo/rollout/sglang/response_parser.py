"""Parses and validates SGLang's responses to /generate.

A response of 32,768 tokens with routes of 48 layers x 8 has 65 MiB, nearly all of it routes: they
are decoded from the body that was received, in pieces, into an array of the smallest type, so that
no second copy of them exists.
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pybase64

from megatron_gspo.rollout.server_engine.response_checks import (
    TokenId,
    cached_tokens,
    check_end,
    checked_log_probs,
    checked_reason,
    checked_support,
    checked_tokens,
    checked_top,
    decoded,
    single_version,
)
from megatron_gspo.rollout.server_engine.server_api import (
    InputScores,
    RequestContext,
    ResponseError,
    ResponsePart,
)
from megatron_gspo.routing_replay.routes import expert_id_dtype, unknown_expert

# Of one output token in a response: id, log-prob and its text, up to 128 characters in a vocabulary.
_TOKEN_BYTES = 512
_FIXED_BYTES = 64 * 1024
_PIECE_IDS = 1 << 16  # expert ids that are decoded at a time: they stay in the processor's cache


class TokenLogProb(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """SGLang's [log-prob, id, text]. The text is not read."""

    log_prob: float
    token: TokenId


class InputTokenLogProb(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The log-prob of an input token. The first has none."""

    log_prob: float | None
    token: TokenId


class MetaInfo(msgspec.Struct, frozen=True):
    """`meta_info` of a response. Fields of type Any are checked where they are read."""

    finish_reason: Any = None
    weight_version: Any = None
    weight_versions: Any = None
    cached_tokens: Any = None
    output_token_logprobs: list[TokenLogProb] | None = None
    output_top_logprobs: list[list[TokenLogProb] | None] | None = None
    output_token_sampling_mask: list[list[TokenId]] | None = None
    output_token_sampling_logprobs: list[float] | None = None
    routed_experts: msgspec.Raw = msgspec.Raw()  # a view of the body


class GenerateResponse(msgspec.Struct, frozen=True):
    """A response to /generate, as far as it is read."""

    meta_info: MetaInfo
    output_ids: msgspec.Raw = msgspec.Raw()  # a view of what was decoded


class OutputIds(msgspec.Struct, frozen=True):
    """`output_ids` alone, under its name so that an error says where it is."""

    output_ids: list[TokenId] | None


class ScoreMetaInfo(msgspec.Struct, frozen=True):
    """`meta_info` of a response to logprob_start_len=0."""

    input_token_logprobs: list[InputTokenLogProb]
    input_top_logprobs: list[list[TokenLogProb] | None] | None = None


class ScoreResponse(msgspec.Struct, frozen=True):
    """A response to logprob_start_len=0, as far as it is read."""

    meta_info: ScoreMetaInfo


_GENERATE = msgspec.json.Decoder(GenerateResponse)
_SCORE = msgspec.json.Decoder(ScoreResponse)
_OUTPUT_IDS = msgspec.json.Decoder(OutputIds)
_ROUTES_KEY = b'"routed_experts":"'  # as SGLang writes it
_CUT_OUT = b"(cut out)"  # no base64


def max_response_bytes(context: RequestContext) -> int:
    """A bound on the size of a response in bytes."""
    routes = 0
    if context.model.return_routes:
        shape = context.model.shape
        routes = context.route_rows * len(shape.moe_layers) * shape.experts_per_token * 16 // 3
    ids = 1 + context.max_support + context.top_count
    return _FIXED_BYTES + context.max_new_tokens * ids * _TOKEN_BYTES + routes


def decode_response(body: bytes | bytearray, context: RequestContext) -> GenerateResponse:
    """The body of a response to /generate; its routes stay a view of `body`.

    Raises `ResponseError` for what is not JSON and for values of other types.
    """
    return _decoded_without_routes(body) or decoded(_GENERATE, body, context)


def _decoded_without_routes(body: bytes | bytearray) -> GenerateResponse | None:
    """The response, of which the JSON parser does not see the routes' text: it takes several times
    as long for it as a search for the closing quote. None where that is no valid response.
    """
    key = body.find(_ROUTES_KEY)
    if key < 0:
        return None
    start = key + len(_ROUTES_KEY)
    end = body.find(b'"', start)
    if end < 0:
        return None
    view = memoryview(body)
    try:
        response = _GENERATE.decode(b"".join((view[:start], _CUT_OUT, view[end:])))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    if bytes(response.meta_info.routed_experts) != b'"%b"' % _CUT_OUT:
        return None  # something else has this name
    routes = msgspec.Raw(view[start - 1 : end + 1])
    meta = msgspec.structs.replace(response.meta_info, routed_experts=routes)
    return msgspec.structs.replace(response, meta_info=meta)


def parse_response(response: GenerateResponse, context: RequestContext) -> ResponsePart:
    """The validated response to a /generate request. Raises `ResponseError`.

    The weight version is not compared: see `response_version`, which the caller checks first.
    """
    meta = response.meta_info
    reason = _finish_reason(meta, context)
    tokens, log_probs = _tokens(meta.output_token_logprobs, response.output_ids, context)
    check_end(tokens, reason, context)
    routes = (
        _routes(meta.routed_experts, len(tokens), context) if context.model.return_routes else None
    )
    cached = cached_tokens(meta.cached_tokens, context)
    top = _pairs(meta.output_top_logprobs or [])
    top_ids, top_log_probs = checked_top(top, len(tokens), context)
    masks = meta.output_token_sampling_mask or []
    support_lengths, support_ids = checked_support(masks, tokens, context)
    if support_ids is not None:
        log_probs = _log_probs_over_support(meta, len(tokens), context)
    return ResponsePart(
        tokens,
        log_probs,
        reason,
        routes,
        cached,
        top_ids,
        top_log_probs,
        support_lengths,
        support_ids,
    )


def is_empty(response: GenerateResponse, context: RequestContext) -> bool:
    """Whether a request was aborted before its first token, as in a server's queue. Such a response
    has nothing else.

    Raises `ResponseError`.
    """
    if _finish_reason(response.meta_info, context) != "abort":
        return False
    return not _output_ids(response.output_ids, context)


def response_version(response: GenerateResponse, context: RequestContext) -> str:
    """The weight version of a response. Raises `ResponseError` for none or several."""
    return single_version(
        response.meta_info.weight_version, response.meta_info.weight_versions, context
    )


def parse_input_scores(
    body: bytes | bytearray, context: RequestContext, tokens: Sequence[int]
) -> InputScores:
    """The scores of the tokens, from the body of a response to logprob_start_len=0.

    Raises `ResponseError`.
    """
    meta = decoded(_SCORE, body, context).meta_info
    entries = meta.input_token_logprobs
    if len(entries) != len(tokens):
        raise ResponseError(
            f"{context.name}: input_token_logprobs has {len(entries)} entries for"
            f" {len(tokens)} tokens"
        )
    log_probs = [entry.log_prob for entry in entries[1:] if entry.log_prob is not None]
    if len(log_probs) != len(entries) - 1:
        raise ResponseError(f"{context.name}: a log-prob of input_token_logprobs is missing")
    checked = checked_log_probs(log_probs, context)
    # SGLang reports the last id of the vocabulary as 0, with its own log-prob.
    last = context.model.vocab_size - 1
    reported = [0 if token == last else token for token in tokens[1:]]
    if [entry.token for entry in entries[1:]] not in (list(tokens[1:]), reported):
        raise ResponseError(
            f"{context.name}: input_token_logprobs is of other tokens than were sent"
        )
    top = _pairs((meta.input_top_logprobs or [])[1:])
    return InputScores(checked, *checked_top(top, len(checked), context))


def _pairs(rows: Sequence[list[TokenLogProb] | None]) -> list[list[tuple[float, int]]]:
    """(log-prob, id) of the most likely ids at each token."""
    return [[(entry.log_prob, entry.token) for entry in row or ()] for row in rows]


def _finish_reason(meta: MetaInfo, context: RequestContext) -> str:
    reason = meta.finish_reason
    name = reason.get("type") if isinstance(reason, dict) else None
    return checked_reason(name, reason, context)


def _tokens(
    entries: list[TokenLogProb] | None, output_ids: msgspec.Raw, context: RequestContext
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [n] int64 and log-probs [n] float32.

    output_ids: the same ids once more, or nothing.
    """
    if entries is None:
        raise ResponseError(f"{context.name}: no output_token_logprobs came back")
    log_probs = checked_log_probs([entry.log_prob for entry in entries], context)
    listed = [entry.token for entry in entries]
    ids = checked_tokens(listed, context)
    # Compared as text; parsed where that differs.
    if msgspec.json.encode(listed) != bytes(output_ids):
        again = _output_ids(output_ids, context)
        if again is not None and again != listed:
            raise ResponseError(
                f"{context.name}: output_ids and output_token_logprobs disagree about the tokens"
            )
    return ids, log_probs


def _log_probs_over_support(meta: MetaInfo, count: int, context: RequestContext) -> np.ndarray:
    """[n] float32: `output_token_logprobs` are over the whole vocabulary."""
    log_probs = checked_log_probs(meta.output_token_sampling_logprobs or [], context)
    if len(log_probs) != count:
        raise ResponseError(
            f"{context.name}: output_token_sampling_logprobs has {len(log_probs)} entries for"
            f" {count} tokens"
        )
    return log_probs


def _output_ids(raw: msgspec.Raw, context: RequestContext) -> list[int] | None:
    """The ids of `output_ids`; None where there are none."""
    return decoded(_OUTPUT_IDS, b'{"output_ids":%b}' % (bytes(raw) or b"null"), context).output_ids


def _routes(raw: msgspec.Raw, count: int, context: RequestContext) -> np.ndarray:
    """[rows, MoE layers, k] of `expert_id_dtype`. SGLang sends [rows, num_layers, k] int32 in
    base64, dense layers included."""
    shape = context.model.shape
    num_layers = len(shape.moe_layers)
    k = shape.experts_per_token
    text = memoryview(raw)
    if bytes(text[:1]) != b'"':
        hint = (
            "start the server with --enable-return-routed-experts; a router in front may drop them"
        )
        raise ResponseError(f"{context.name}: no routed_experts came back; {hint}")
    text = text[1:-1]
    rows = max(context.context_length + count - 1 - context.routes_start, 0)
    if len(text) != _base64_length(4 * rows * num_layers * k):
        size = _base64_ids(text, context).size
        wanted = f"{rows} rows x {num_layers} layers x {k}"
        raise ResponseError(f"{context.name}: routed_experts holds {size} ids, not {wanted}")
    moe = np.flatnonzero(shape.moe_layers)
    routes = np.empty((rows, len(moe), k), dtype=expert_id_dtype(shape.num_experts))
    # Three rows are a whole number of base64's 3 bytes.
    step = 3 * max(_PIECE_IDS // (3 * num_layers * k), 1)
    for start in range(0, rows, step):
        piece = routes[start : start + step]
        first = _base64_length(4 * start * num_layers * k)
        last = _base64_length(4 * (start + len(piece)) * num_layers * k)
        ids = _base64_ids(text[first:last], context)
        if ids.size != len(piece) * num_layers * k:  # padding inside the text
            raise _not_base64(context)
        ids = ids.reshape(-1, num_layers, k)
        piece[...] = _in_range(ids if len(moe) == num_layers else ids[:, moe], context)
    return routes


def _in_range(ids: np.ndarray, context: RequestContext) -> np.ndarray:
    num_experts = context.model.shape.num_experts
    if ids.size and ids.max() >= num_experts:
        signed = ids.view(np.int32)
        wrong = signed.min() if signed.min() < 0 else signed.max()
        raise ResponseError(
            f"{context.name}: routed_experts has {unknown_expert(wrong, num_experts)}"
        )
    return ids


def _base64_ids(text: memoryview, context: RequestContext) -> np.ndarray:
    """Integers of 32 bits, read as unsigned: a negative one is above every expert."""
    try:
        return np.frombuffer(pybase64.b64decode(text, validate=True), dtype="<u4")
    except (binascii.Error, ValueError):
        raise _not_base64(context) from None


def _base64_length(num_bytes: int) -> int:
    return -(-num_bytes // 3) * 4


def _not_base64(context: RequestContext) -> ResponseError:
    return ResponseError(f"{context.name}: routed_experts is not base64 of int32")
