"""A finished run as one sample: its rows end to end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_gspo.agents.agent_session import FinishedRun
from megatron_gspo.agents.session_tree import Row
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.data.turn_spans import Span, with_spans
from megatron_gspo.rewards.scorer import FAILURE

MESSAGES = "messages"
COUNTS = "agent"
"""The keys of `Sample.metadata` with the messages of a run's last call, and its `counts`."""


def run_sample(
    prompt: Prompt, sample_index: int, finished: FinishedRun, *, has_messages: bool = True
) -> Sample:
    """The sample of a run. Its prompt is that of its first call; later rows are a part of the
    response, with masked prompts. A run without a call is the data's prompt without a response.

    has_messages: whether the metadata has the messages, and the text is that of the last one.
    Otherwise the text is that of all messages behind the first.
    """
    outcome = finished.outcome
    metadata: dict[str, Any] = {COUNTS: dict(finished.counts)}
    if has_messages:
        metadata[MESSAGES] = [message.record() for message in finished.messages]
    shown = finished.messages[-1:] if has_messages else finished.messages[1:]
    if outcome.failure:
        metadata[FAILURE] = outcome.failure
    rows = finished.rows
    if not rows:
        return Sample(
            prompt_index=prompt.index,
            sample_index=sample_index,
            tokens=prompt.token_ids,
            prompt_length=prompt.length,
            loss_mask=np.zeros(0, dtype=np.bool_),
            rollout_log_probs=np.zeros(0, dtype=np.float32),
            finish_reason="stop",
            row_lengths=np.array([prompt.length]),
            metadata=metadata,
        )
    versions = np.concatenate([_in_response(row, i, row.versions) for i, row in enumerate(rows)])
    versions = _with_versions_of_prompts(versions, rows)
    routes, missing = _joined_routes(rows)
    return Sample(
        prompt_index=prompt.index,
        sample_index=sample_index,
        tokens=np.concatenate([row.tokens for row in rows]),
        prompt_length=rows[0].prompt_length,
        loss_mask=np.concatenate(
            [_in_response(row, i, row.loss_mask) for i, row in enumerate(rows)]
        ),
        rollout_log_probs=_joined_log_probs(rows),
        finish_reason="length" if outcome.is_cut else rows[-1].finish_reason,
        text="".join(message.content for message in shown),
        weight_version=int(versions.min()) if len(versions) else 0,
        token_versions=versions,
        reward=outcome.reward,
        routed_experts=routes,
        missing_routes=missing,
        row_lengths=np.array([len(row.tokens) for row in rows], dtype=np.int64),
        metadata=metadata | with_spans(_turns(finished)),
    )


def _in_response(row: Row, number: int, values: np.ndarray) -> np.ndarray:
    """The values [R] of a row as those of its tokens in the response, 0 at a later row's prompt."""
    if number == 0:
        return values
    return np.concatenate([np.zeros(row.prompt_length, dtype=values.dtype), values])


def _with_versions_of_prompts(versions: np.ndarray, rows: Sequence[Row]) -> np.ndarray:
    """The prompts of later rows get the version of the first reply in their row."""
    start = len(rows[0].tokens) - rows[0].prompt_length
    for row in rows[1:]:
        versions[start : start + row.prompt_length] = row.versions[0]
        start += len(row.tokens)
    return versions


def _joined_log_probs(rows: Sequence[Row]) -> np.ndarray | None:
    known = [row.log_probs for row in rows if row.log_probs is not None]
    if len(known) < len(rows):
        return None
    return np.concatenate(
        [
            _in_response(row, number, log_probs)
            for number, (row, log_probs) in enumerate(zip(rows, known, strict=True))
        ]
    )


def _joined_routes(rows: Sequence[Row]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The routes of all rows, and which are missing. Between two rows is one of the last token of
    the first, which has no meaning."""
    known = [row.routes for row in rows if row.routes is not None]
    if len(known) < len(rows):
        return None, None
    any_route = np.empty((1, *known[0].shape[1:]), dtype=known[0].dtype)
    any_route[:] = np.arange(any_route.shape[-1])
    routes: list[np.ndarray] = []
    missing: list[np.ndarray] = []
    for row, row_routes in zip(rows, known, strict=True):
        if routes:
            routes.append(any_route)
            missing.append(np.zeros(1, dtype=np.bool_))
        routes.append(row_routes)
        missing.append(
            np.zeros(len(row_routes), dtype=np.bool_)
            if row.missing_routes is None
            else row.missing_routes
        )
    is_missing = np.concatenate(missing)
    return np.concatenate(routes), is_missing if is_missing.any() else None


def _turns(finished: FinishedRun) -> list[Span]:
    """The trained replies in the order of their delivery. What the run has earned beyond the
    rewards of single replies is of the last one."""
    spans: list[tuple[int, Span]] = []
    start = -finished.rows[0].prompt_length  # of the row's tokens in the response
    for row in finished.rows:
        for turn in row.turns:
            offset = start + row.prompt_length
            reward = finished.turn_rewards.get(turn.index, 0.0)
            spans.append((turn.index, Span(offset + turn.start, offset + turn.end, reward)))
        start += len(row.tokens)
    turns = [span for _, span in sorted(spans, key=lambda indexed: indexed[0])]
    rest = finished.outcome.reward - sum(turn.reward for turn in turns)
    if math.isfinite(rest):
        turns[-1] = replace(turns[-1], reward=turns[-1].reward + rest)
    return turns
