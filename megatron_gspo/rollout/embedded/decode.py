"""The decoding loop: prefill a prompt once, repeat its cache for its samples, drop finished
rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from megatron_gspo.config import SamplingParams
from megatron_gspo.rollout.embedded.kv_cache import BufferCache, kinds_of
from megatron_gspo.rollout.embedded.perturbed_routers import PerturbedRouters
from megatron_gspo.rollout.embedded.route_recorder import DecodedRoutes, RouteRecorder
from megatron_gspo.rollout.embedded.selection_recorder import DecodedSelections, SelectionRecorder
from megatron_gspo.rollout.embedded.token_sampling import choose_tokens

LayerMasks: TypeAlias = Tensor | dict[str, Tensor | None] | None
"""Of all layers, or by the type of a layer."""

# Finished rows are dropped when they are 1/8 of the batch: copying the cache costs 1/4 of a step.
_DROP_SHARE = 8
_RESERVE = 128  # columns of cache allocated ahead of need


@dataclass
class Responses:
    """B responses of at most R tokens."""

    tokens: np.ndarray
    """[B, R] int64, valid up to `lengths`."""

    log_probs: np.ndarray
    """[B, R] float32, valid up to `lengths`."""

    lengths: np.ndarray
    """[B] int64, tokens of each response."""

    stopped: np.ndarray
    """[B] bool: whether an end token ended it, which is then the last one."""

    top_ids: np.ndarray
    """[B, R, K] int32, the most likely ids at each token, valid up to `lengths`."""

    top_log_probs: np.ndarray
    """[B, R, K] float32, of these."""

    supports: list[tuple[np.ndarray, np.ndarray]] | None = None
    """`Sample.support_lengths` and `support_ids` of each response, with
    `SamplingParams.max_support`."""

    routes: list[np.ndarray] | None = None
    """Expert ids of each response, [P + length - 1, layers, k]."""

    selections: list[np.ndarray | None] | None = None
    """Of each response, see `DecodedSelections.of_rows`."""


@dataclass(frozen=True)
class DecodeBatch:
    """B responses to decode together."""

    prompts: list[np.ndarray]
    """Token ids [P_i] int64 of each of N distinct prompts."""

    prompt_of_row: np.ndarray
    """[B] int64, position in `prompts` of the prompt of each response."""

    prompt_index: np.ndarray
    """[N] int64, index of each prompt in its source."""

    sample_index: np.ndarray
    """[B] int64, number of each response among those to its prompt."""

    uniforms: np.ndarray | None = None
    """[B, R] float32, R = max_response_length; None when greedy."""


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    requests: DecodeBatch,
    sampling: SamplingParams,
    stop_ids: Tensor,
    recorder: RouteRecorder | None = None,
    routers: PerturbedRouters | None = None,
    selection_recorder: SelectionRecorder | None = None,
    *,
    top_count: int = 0,
) -> Responses:
    """Generate one response per row.

    Args:
        top_count: K, most likely ids per token whose log-probs are returned.
        stop_ids: [E] int64 on the model's device.
        recorder: on the model's hooks, to return routes; else None.
        routers: of the model, where they are perturbed.
        selection_recorder: on the model's hooks, to return selections; else None.
    """
    device = model.device
    limit = sampling.max_response_length
    batch = len(requests.prompt_of_row)
    logits, state = _prefill(model, requests, limit, routers)
    routes = None
    if recorder is not None:
        routes = DecodedRoutes(recorder, requests.prompts, requests.prompt_of_row)
    selections = None
    if selection_recorder is not None:
        lengths = np.array([len(prompt) for prompt in requests.prompts])
        padding = (lengths.max() - lengths)[requests.prompt_of_row]
        selections = DecodedSelections(selection_recorder, padding, requests.prompt_of_row)
    uniforms = requests.uniforms
    draws = None if uniforms is None else torch.from_numpy(uniforms).to(device).t().contiguous()
    tokens = torch.full((limit, batch), -1, dtype=torch.int64, device=device)
    log_probs = torch.zeros(limit, batch, device=device)
    top_ids = torch.zeros(limit, batch, top_count, dtype=torch.int32, device=device)
    top_log_probs = torch.zeros(limit, batch, top_count, device=device)
    supports: list[tuple[Tensor, Tensor]] = []  # by token: the rows, and the ids of each
    live = torch.arange(batch, device=device)  # which row of the output each row of the batch is
    finished = torch.zeros(batch, dtype=torch.bool, device=device)
    for t in range(limit):
        draw = None if draws is None else draws[t].index_select(0, live)
        choice = choose_tokens(logits, draw, sampling, top_count=top_count)
        chosen = choice.tokens
        tokens[t].index_copy_(0, live, chosen)
        log_probs[t].index_copy_(0, live, choice.log_probs)
        top_ids[t].index_copy_(0, live, choice.top_ids.int())
        top_log_probs[t].index_copy_(0, live, choice.top_log_probs)
        if choice.support is not None:
            supports.append((live, choice.support.int()))
        finished |= torch.isin(chosen, stop_ids)
        done = int(finished.sum())
        if done == len(live) or t + 1 == limit:
            break
        if done * _DROP_SHARE >= len(live):
            keep = (~finished).nonzero()[:, 0]
            live = live[keep]
            chosen = chosen[keep]
            finished = finished[keep]
            state.select_rows(keep)
        logits = state.step(model, chosen)
        if routes is not None:
            routes.add(live)
        if selections is not None:
            selections.add(live, ~finished)
    responses = _collect(
        tokens.t(), log_probs.t(), top_ids.transpose(0, 1), top_log_probs.transpose(0, 1), stop_ids
    )
    if supports:
        responses.supports = _of_rows(supports, responses.lengths)
    if routes is not None:
        responses.routes = routes.of_rows(responses.lengths.tolist())
    if selections is not None:
        responses.selections = selections.of_rows()
    return responses


@dataclass
class _State:
    """State of a decoding step: the cache, the next position of each row [B, 1], the columns
    without padding, and the rows' names [B, 2] for perturbed routers."""

    cache: BufferCache
    positions: Tensor
    key_mask: Tensor | None  # [B, 1, 1, P + R] bool; None when no row is padded
    sequences: Tensor
    routers: PerturbedRouters | None

    def step(self, model: PreTrainedModel, tokens: Tensor) -> Tensor:
        """Feed one token [B] per row; logits [B, V] of the next."""
        if self.routers is not None:
            rows = torch.arange(len(tokens), device=tokens.device)
            self.routers.set_tokens(self.sequences, rows, self.positions[:, 0])
        columns = self.cache.get_seq_length() + 1
        key_mask = None if self.key_mask is None else self.key_mask[..., :columns]
        masks = _masks(model.config, key_mask, columns, tokens.device)
        logits = _last_logits(model, tokens[:, None], masks, self.positions, self.cache)
        self.positions = self.positions + 1
        return logits

    def select_rows(self, rows: Tensor) -> None:
        self.cache.select_rows(rows, self.cache.get_seq_length() + _RESERVE)
        self.positions = self.positions[rows]
        self.sequences = self.sequences[rows]
        if self.key_mask is not None:
            self.key_mask = self.key_mask[rows]


def _masks(
    config: PretrainedConfig, mask: Tensor | None, columns: int, device: torch.device
) -> LayerMasks:
    """What a step's layers attend, in the form that the model takes: ``mask`` [B, 1, 1, columns]
    bool, None: all; where layers have a window, of its last columns only, for each kind of layer if
    the config has kinds.
    """
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if not window or (layer_types and "sliding_attention" not in layer_types):
        return mask
    in_window = (torch.arange(columns, device=device) >= columns - window)[None, None, None]
    if mask is not None:
        in_window = in_window & mask
    if not layer_types:
        return in_window
    return {"full_attention": mask, "sliding_attention": in_window}


def _prefill(
    model: PreTrainedModel, requests: DecodeBatch, limit: int, routers: PerturbedRouters | None
) -> tuple[Tensor, _State]:
    """Logits [B, V] after the prompt of every row, and the state for the next step."""
    rows = torch.from_numpy(requests.prompt_of_row).to(model.device)
    ids, mask = left_pad(requests.prompts)
    ids = ids.to(model.device)
    mask = mask.to(model.device)
    padded = not bool(mask.all())
    columns = ids.shape[1]
    positions = (mask.cumsum(-1) - 1).clamp_(min=0)
    cache = BufferCache(kinds_of(model.config), columns)
    if routers is not None:
        segments = torch.arange(len(mask), device=mask.device).repeat_interleave(columns)
        routers.set_tokens(_prompt_names(requests), segments, positions.reshape(-1))
    logits = _last_logits(model, ids, mask if padded else None, positions, cache)
    key_mask = None
    if padded:
        key_mask = torch.nn.functional.pad(mask.bool(), (0, limit), value=True)[rows, None, None]
    cache.select_rows(rows, columns + min(limit, _RESERVE))
    prompt_index = requests.prompt_index[requests.prompt_of_row]
    names = np.stack([prompt_index, requests.sample_index], axis=1)
    state = _State(
        cache,
        mask.sum(-1, keepdim=True)[rows],
        key_mask,
        torch.from_numpy(names).to(model.device),
        routers,
    )
    return logits.index_select(0, rows), state


def _last_logits(
    model: PreTrainedModel,
    tokens: Tensor,
    mask: LayerMasks,
    positions: Tensor,
    cache: BufferCache,
) -> Tensor:
    """Logits [B, V] after the last of the tokens [B, L], whose keys and values are added to the
    cache.
    """
    output = model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
        **{_cache_argument(type(model).forward): cache},
    )
    return output.logits[:, -1]


@functools.cache
def _cache_argument(forward: Callable[..., object]) -> str:
    """Transformers renames the argument from ``past_key_values``, model by model."""
    return "cache" if "cache" in signature(forward).parameters else "past_key_values"


def _prompt_names(requests: DecodeBatch) -> Tensor:
    """[N, 2]: a prompt belongs to no sample, all of which read it."""
    no_sample = np.full(len(requests.prompts), -1)
    return torch.from_numpy(np.stack([requests.prompt_index, no_sample], axis=1))


def left_pad(prompts: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Token ids [N, P] int64 and mask [N, P] int64 (1 where real), padded on the left with id 0."""
    width = max(len(ids) for ids in prompts)
    ids = np.zeros((len(prompts), width), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


def _collect(
    tokens: Tensor, log_probs: Tensor, top_ids: Tensor, top_log_probs: Tensor, stop_ids: Tensor
) -> Responses:
    """Cut every row after its first end token: finished rows are decoded until they are dropped."""
    ends = torch.isin(tokens, stop_ids)
    stopped = ends.any(-1)
    lengths = torch.where(stopped, ends.int().argmax(-1) + 1, tokens.shape[1])
    return Responses(
        tokens=tokens.cpu().numpy(),
        log_probs=log_probs.cpu().numpy(),
        lengths=lengths.cpu().numpy(),
        stopped=stopped.cpu().numpy(),
        top_ids=top_ids.cpu().numpy(),
        top_log_probs=top_log_probs.cpu().numpy(),
    )


def _of_rows(
    supports: list[tuple[Tensor, Tensor]], lengths: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(support_lengths, support_ids) of each row from those of each token: (rows [b], ids [b, W] with
    -1 after a row's).

    lengths: [B] of the responses, whose rows may have been decoded further.
    """
    widest = max(ids.shape[1] for _, ids in supports)
    rows = torch.cat([live for live, _ in supports]).cpu().numpy()
    times = np.repeat(np.arange(len(supports)), [len(live) for live, _ in supports])
    ids = torch.cat(
        [torch.nn.functional.pad(i, (0, widest - i.shape[1]), value=-1) for _, i in supports]
    )
    is_valid = times < lengths[rows]
    by_row = np.argsort(rows[is_valid], kind="stable")
    padded = ids.cpu().numpy()[is_valid][by_row]
    counts = (padded >= 0).sum(1).astype(np.int32)
    of_rows = np.split(counts, np.cumsum(lengths)[:-1])
    ends = np.cumsum([int(row.sum()) for row in of_rows])
    flat = padded[padded >= 0].astype(np.int32)
    return list(zip(of_rows, np.split(flat, ends[:-1]), strict=True))
