"""Parses and validates vLLM's responses to /inference/v1/generate.

Its tokens come with their log-probs and spans of weight versions; its routes are a .npy file in
base64.
"""

from __future__ import annotations

import binascii
import io
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
from megatron_gspo.routing_replay.routes import MISSING, expert_id_dtype, unknown_expert

_TOKEN_BYTES = 512  # of one output token in a response: its id, and twice its log-prob and rank
_FIXED_BYTES = 64 * 1024
_MAX_ID_BYTES = 4  # of an expert id in a .npy file
_FLOOR = -9999.0  # vLLM's stand-in for a log-prob that is NaN or minus infinity


class TopLogProb(msgspec.Struct, gc=False, frozen=True):
    """The log-prob of an id at a token, and how many are at least as likely."""

    token_id: TokenId
    logprob: float
    rank: int | None = None


class TokenLogProb(msgspec.Struct, frozen=True):
    """The log-prob of a sampled token. `top_logprobs` begins with it, whatever its rank."""

    token_id: TokenId
    logprob: float
    top_logprobs: list[TopLogProb] = []


class LogProbs(msgspec.Struct, frozen=True):
    """`logprobs` of a choice."""

    content: list[TokenLogProb] | None = None


class Choice(msgspec.Struct, frozen=True):
    """The one response. Fields of type Any are checked where they are read."""

    finish_reason: Any = None
    token_ids: list[TokenId] | None = None
    logprobs: LogProbs | None = None
    weight_versions: Any = None
    routed_experts: str | None = None


class GenerateResponse(msgspec.Struct, frozen=True):
    """A response to /inference/v1/generate, as far as it is read."""

    choices: list[Choice]
    usage: Any = None
    prompt_routed_experts: str | None = None
    """Routes of the prompt, which come apart from those of the response."""


class PromptLogProb(msgspec.Struct, gc=False, frozen=True):
    """The log-prob of an id at an input token, and how many are at least as likely."""

    logprob: float
    rank: int | None = None


class ScoreResponse(msgspec.Struct, frozen=True):
    """A response to prompt_logprobs, as far as it is read: token id, as text, to its log-prob."""

    prompt_logprobs: list[dict[str, PromptLogProb] | None]


_GENERATE = msgspec.json.Decoder(GenerateResponse)
_SCORE = msgspec.json.Decoder(ScoreResponse)


def max_response_bytes(context: RequestContext) -> int:
    """A bound on the size of a response in bytes."""
    routes = 0
    if context.model.return_routes:
        shape = context.model.shape
        ids = context.route_rows * len(shape.moe_layers) * shape.experts_per_token
        routes = ids * _MAX_ID_BYTES * 4 // 3  # base64
    ids = 2 + context.max_support + context.top_count
    return _FIXED_BYTES + context.max_new_tokens * ids * _TOKEN_BYTES + routes


def decode_response(body: bytes | bytearray, context: RequestContext) -> GenerateResponse:
    """The body of a response.

    Raises `ResponseError` for what is not JSON, values of other types, several choices.
    """
    response = decoded(_GENERATE, body, context)
    if len(response.choices) != 1:
        raise ResponseError(
            f"{context.name}: {len(response.choices)} choices came back for one request"
        )
    return response


def is_empty(response: GenerateResponse, context: RequestContext) -> bool:
    """Whether a request was aborted before its first token. Raises `ResponseError`."""
    choice = response.choices[0]
    reason = checked_reason(choice.finish_reason, choice.finish_reason, context)
    return reason == "abort" and not choice.token_ids


def response_version(response: GenerateResponse, context: RequestContext) -> str:
    """The weight version of a response.

    Raises `ResponseError` for none or several, and for tokens without one.
    """
    choice = response.choices[0]
    spans = choice.weight_versions
    first = spans[0] if isinstance(spans, list) and spans else None
    version = single_version(
        first.get("version") if isinstance(first, dict) else None, spans, context
    )
    bounds = [(span.get("start"), span.get("end")) for span in spans]
    starts = [start for start, _ in bounds]
    ends = [end for _, end in bounds]
    # Each span begins where the one before ends.
    if [0, *ends] != [*starts, len(choice.token_ids or ())]:
        raise ResponseError(
            f"{context.name}: weight_versions is of the tokens {bounds}, not of all tokens"
        )
    return version


def parse_response(response: GenerateResponse, context: RequestContext) -> ResponsePart:
    """The validated response. Raises `ResponseError`.

    The weight version is not compared: see `response_version`, which the caller checks first.
    """
    choice = response.choices[0]
    usage = response.usage
    reason = checked_reason(choice.finish_reason, choice.finish_reason, context)
    if choice.token_ids is None:
        raise ResponseError(f"{context.name}: no token_ids came back")
    tokens = checked_tokens(choice.token_ids, context)
    log_probs = _log_probs(choice, context) if context.log_probs else None
    check_end(tokens, reason, context)
    routes = _routes(response, len(tokens), context) if context.model.return_routes else None
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    top_ids, top_log_probs = checked_top(_top(choice, context), len(tokens), context)
    support_lengths, support_ids = checked_support(_support(choice), tokens, context)
    return ResponsePart(
        tokens,
        log_probs,
        reason,
        routes,
        cached_tokens(cached, context),
        top_ids,
        top_log_probs,
        support_lengths,
        support_ids,
    )


def parse_input_scores(
    body: bytes | bytearray, context: RequestContext, tokens: Sequence[int]
) -> InputScores:
    """The scores of the tokens, from the body of a response to prompt_logprobs.

    Raises `ResponseError`.
    """
    rows = decoded(_SCORE, body, context).prompt_logprobs
    if len(rows) != len(tokens):
        raise ResponseError(
            f"{context.name}: prompt_logprobs has {len(rows)} entries for {len(tokens)} tokens"
        )
    entries = [(row or {}).get(str(token)) for row, token in zip(rows[1:], tokens[1:], strict=True)]
    values = [entry.logprob for entry in entries if entry is not None]
    if len(values) != len(entries):
        raise ResponseError(
            f"{context.name}: prompt_logprobs lacks the log-prob of a token that was sent"
        )
    log_probs = _finite(values, context)
    top = [
        [
            (entry.rank, entry.logprob, int(token))
            for token, entry in (row or {}).items()
            if token.isdecimal()
        ]
        for row in rows[1:]
    ]
    return InputScores(log_probs, *checked_top(_by_rank(top, context), len(log_probs), context))


def _log_probs(choice: Choice, context: RequestContext) -> np.ndarray:
    rows = choice.logprobs.content if choice.logprobs is not None else None
    if rows is None:
        raise ResponseError(f"{context.name}: no logprobs came back")
    if [row.token_id for row in rows] != choice.token_ids:
        raise ResponseError(f"{context.name}: token_ids and logprobs disagree about the tokens")
    return _finite([row.logprob for row in rows], context)


def _top(choice: Choice, context: RequestContext) -> list[list[tuple[float, int]]]:
    """(log-prob, id) of the most likely ids at each token, by rank. The sampled token is not among
    them unless its rank is: which ids they are must not depend on the draw."""
    rows = choice.logprobs.content if choice.logprobs is not None else None
    every = [
        [(entry.rank, entry.logprob, entry.token_id) for entry in row.top_logprobs]
        for row in rows or ()
    ]
    return _by_rank(every, context)


def _by_rank(
    rows: Sequence[Sequence[tuple[int | None, float, int]]], context: RequestContext
) -> list[list[tuple[float, int]]]:
    """(log-prob, id) of the ids that were asked for, from (rank, log-prob, id) of these and others."""
    ranked = [
        sorted(
            (rank, log_prob, token)
            for rank, log_prob, token in row
            if rank is not None and rank <= context.top_count
        )
        for row in rows
    ]
    _refuse_floor([log_prob for row in ranked for _, log_prob, _ in row], context)
    return [[(log_prob, token) for _, log_prob, token in row] for row in ranked]


def _support(choice: Choice) -> list[list[int]]:
    """The ids at each token whose log-prob is finite: processed log-probs are minus infinity
    outside of what could be drawn."""
    rows = choice.logprobs.content if choice.logprobs is not None else None
    return [
        [entry.token_id for entry in row.top_logprobs if entry.logprob != _FLOOR]
        for row in rows or ()
    ]


def _finite(values: list[float], context: RequestContext) -> np.ndarray:
    _refuse_floor(values, context)
    return checked_log_probs(values, context)


def _refuse_floor(values: list[float], context: RequestContext) -> None:
    if _FLOOR in values:
        raise ResponseError(
            f"{context.name}: the log-prob {_FLOOR:g} came back, which vLLM sends in place of NaN"
            " and minus infinity"
        )


def _routes(response: GenerateResponse, count: int, context: RequestContext) -> np.ndarray:
    """[rows, MoE layers, k], rows without a route -1: signed if there are any, else of
    `expert_id_dtype`.

    The rows of the prompt may come apart, those of a cached prefix may be -1, and the last one may
    be missing.
    """
    shape = context.model.shape
    sent = (response.prompt_routed_experts, response.choices[0].routed_experts)
    files = [text for text in sent if text is not None]
    if not files:
        hint = (
            "a preempted request has none; else start the server with"
            " --enable-return-routed-experts"
        )
        raise ResponseError(f"{context.name}: no routed_experts came back; {hint}")
    arrays = [_npy(text, context) for text in files]
    moe = np.flatnonzero(shape.moe_layers)
    rows = context.context_length + count - 1 - context.routes_start
    wanted = (len(moe), shape.experts_per_token)
    for i, array in enumerate(arrays):
        if array.ndim == 3 and array.shape[1] == len(shape.moe_layers):
            arrays[i] = array[:, moe]
    shapes = [array.shape for array in arrays]
    if any(array.ndim != 3 or array.shape[1:] != wanted for array in arrays):
        raise ResponseError(
            f"{context.name}: routed_experts is {shapes}, not rows x {wanted[0]} layers x"
            f" {wanted[1]}"
        )
    missing = max(rows, 0) - sum(array.shape[0] for array in arrays)
    if missing not in (0, 1):
        raise ResponseError(
            f"{context.name}: routed_experts has {sum(shape[0] for shape in shapes)} rows, not"
            f" {rows}"
        )
    if missing:
        arrays.append(np.full((1, *wanted), MISSING, dtype=np.int32))
    return _in_range(arrays[0] if len(arrays) == 1 else np.concatenate(arrays), context)


def _npy(text: str, context: RequestContext) -> np.ndarray:
    """The integers of a .npy file in base64. Nothing is unpickled."""
    try:
        array = np.load(io.BytesIO(pybase64.b64decode(text, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError, OSError, MemoryError):
        # MemoryError: a header may claim any size.
        raise ResponseError(
            f"{context.name}: routed_experts is not a .npy file in base64"
        ) from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
        raise ResponseError(f"{context.name}: routed_experts has no integers")
    return array


def _in_range(ids: np.ndarray, context: RequestContext) -> np.ndarray:
    num_experts = context.model.shape.num_experts
    smallest, largest = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
    if smallest < MISSING or largest >= num_experts:
        wrong = smallest if smallest < MISSING else largest
        raise ResponseError(
            f"{context.name}: routed_experts has {unknown_expert(wrong, num_experts)}"
        )
    return ids if smallest < 0 else ids.astype(expert_id_dtype(num_experts), copy=False)
