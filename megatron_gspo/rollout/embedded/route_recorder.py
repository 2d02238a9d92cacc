"""The experts that a Transformers model uses while it decodes, recorded by a hook on each MoE
layer's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.embedded.model_modules import modules_of
from megatron_gspo.routing_replay.routes import expert_id_dtype

_BLOCK = 128  # decoding steps allocated at once


class RouteRecorder:
    """Records the top-k experts of every forward pass of `model`, MoE layers only, in model order.

    The hooks are on the modules that compute experts. Transformers (5.0 and later) calls them with
    the chosen ids, so the recorded ids are those that were used, for every family's router.
    `remove` removes the hooks.

    Raises ValueError (one line) for a model without such modules.
    """

    def __init__(self, model: nn.Module) -> None:
        missing = "MoE layer to return routed experts of: leave them off"
        experts = modules_of(model, _computes_experts, missing)
        self.dtype = expert_id_dtype(max(module.num_experts for module in experts))
        # torch supports few operations on uint16: the same bits as int16
        self._stored = torch.uint8 if self.dtype.itemsize == 1 else torch.int16
        self._recorded: list[Tensor | None] = [None] * len(experts)
        self._hooks = [
            module.register_forward_pre_hook(self._hook(layer), with_kwargs=True)
            for layer, module in enumerate(experts)
        ]

    def last_ids(self) -> Tensor:
        """The experts of the last forward pass, [tokens, layers, k] uint8 (int16 above 256 experts,
        to be read as `dtype`). Raises EngineError if a layer did not run since the last call."""
        silent = [layer for layer, ids in enumerate(self._recorded) if ids is None]
        if silent:
            raise EngineError(
                f"MoE layer {silent[0]} chose no experts in a forward pass; its routes are unknown"
            )
        ids = torch.stack([ids for ids in self._recorded if ids is not None], dim=1)
        self._recorded = [None] * len(self._recorded)
        return ids

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, layer: int) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            ids = args[1] if len(args) > 1 else kwargs["top_k_index"]
            self._recorded[layer] = ids.to(self._stored)

        return record


class DecodedRoutes:
    """The routes of one decoded batch: those of the prompts, then a row for each decoded token.

    prompts: token ids [P_i] of each distinct prompt; prefill: [N * P, layers, k], recorded when
    they were processed as one left-padded batch [N, P]; prompt_of_row: [B] int64, the prompt of each
    row of the batch.
    """

    def __init__(
        self, recorder: RouteRecorder, prompts: Sequence[np.ndarray], prompt_of_row: np.ndarray
    ) -> None:
        self._recorder = recorder
        self._prompt_of_row = prompt_of_row
        prefill = recorder.last_ids()
        padded = prefill.view(len(prompts), -1, *prefill.shape[1:])
        self._prompts = [
            self._numpy(ids[len(ids) - len(prompt) :])
            for prompt, ids in zip(prompts, padded, strict=True)
        ]
        self._blocks: list[Tensor] = []  # [B, _BLOCK, layers, k] each
        self._steps = 0

    def add(self, live: Tensor) -> None:
        """Record the step that processed one token of each row in `live` [b] int64."""
        ids = self._recorder.last_ids()
        step_in_block = self._steps % _BLOCK
        if step_in_block == 0:
            self._blocks.append(ids.new_empty(len(self._prompt_of_row), _BLOCK, *ids.shape[1:]))
        self._blocks[-1][:, step_in_block].index_copy_(0, live, ids)
        self._steps += 1

    def of_rows(self, lengths: Sequence[int]) -> list[np.ndarray]:
        """[P + R - 1, layers, k] of `recorder.dtype` for each row, whose response has R =
        lengths[i] tokens; the last one is not an input."""
        blocks = [self._numpy(block) for block in self._blocks]
        sequences = []
        for row, length in enumerate(lengths):
            fed = [
                block[row, : max(length - 1 - start, 0)]
                for start, block in zip(self._starts, blocks, strict=True)
            ]
            sequences.append(np.concatenate([self._prompts[self._prompt_of_row[row]], *fed]))
        return sequences

    @property
    def _starts(self) -> range:
        return range(0, self._steps, _BLOCK)

    def _numpy(self, ids: Tensor) -> np.ndarray:
        return ids.cpu().numpy().view(self._recorder.dtype)


def _computes_experts(module: nn.Module) -> bool:
    """Whether it implements Transformers' experts interface: called with (hidden states, expert
    ids, weights).
    """
    return (
        hasattr(module, "is_transposed")
        and hasattr(module, "_apply_gate")
        and hasattr(module, "num_experts")
    )
