"""What the indexers of sparse attention select while a Transformers model decodes, of the last
token that each response feeds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.embedded.model_modules import modules_of


class SelectionRecorder:
    """Records the selection of the last token of every forward pass of ``model``, by hooks on its
    indexers. `remove` removes them.

    Raises ValueError (one line) for a model without indexers.
    """

    def __init__(self, model: nn.Module) -> None:
        indexers = modules_of(model, _is_indexer, "indexer whose selections could be recorded")
        self.topk: int = indexers[0].index_topk
        self._recorded: list[Tensor | None] = [None] * len(indexers)
        self._hooks = [
            module.register_forward_hook(self._hook(layer)) for layer, module in enumerate(indexers)
        ]

    def last_columns(self) -> Tensor | None:
        """Columns of the cache [B, layers, topk] int32 that the last pass selected; None where the
        cache has no more of them. Raises EngineError if a layer did not run since the last call."""
        selected = [columns for columns in self._recorded if columns is not None]
        if len(selected) < len(self._recorded):
            raise EngineError("a layer of sparse attention selected nothing in a forward pass")
        self._recorded = [None] * len(self._recorded)
        stacked = torch.stack(selected, dim=1)
        return stacked if stacked.shape[-1] == self.topk else None

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, layer: int) -> Callable[..., None]:
        def record(module: nn.Module, arguments: object, selected: Tensor) -> None:
            self._recorded[layer] = selected[:, -1]

        return record


class DecodedSelections:
    """The selections of the last token that each row fed, of a decoded batch of B rows.

    padding: [B] int64, the columns before a row's prompt. prompt_of_row: see `DecodedRoutes`.
    """

    def __init__(
        self, recorder: SelectionRecorder, padding: np.ndarray, prompt_of_row: np.ndarray
    ) -> None:
        self._recorder = recorder
        self._padding = padding
        self._columns: Tensor | None = None  # [B, layers, topk]
        self._known: Tensor | None = None  # [B] bool, on the device as they are
        columns = recorder.last_columns()
        if columns is not None:
            prompts = torch.from_numpy(prompt_of_row).to(columns.device)
            self._keep(torch.arange(len(prompts), device=columns.device), columns[prompts])

    def add(self, rows: Tensor, is_response: Tensor) -> None:
        """Record the step that fed one token of each of ``rows`` [b]. is_response: [b] bool, False
        of those that had ended before."""
        columns = self._recorder.last_columns()
        if columns is not None:
            self._keep(rows[is_response], columns[is_response])

    def of_rows(self) -> list[np.ndarray | None]:
        """The selection of each row: ascending positions [layers, topk] int32; None where it had no
        more of them."""
        if self._columns is None or self._known is None:
            return [None] * len(self._padding)
        columns = self._columns.sort(dim=-1).values.cpu().numpy()
        return [
            row - np.int32(padding) if known else None
            for row, padding, known in zip(
                columns, self._padding, self._known.tolist(), strict=True
            )
        ]

    def _keep(self, rows: Tensor, columns: Tensor) -> None:
        if self._columns is None or self._known is None:
            batch = len(self._padding)
            self._columns = columns.new_zeros(batch, *columns.shape[1:])
            self._known = torch.zeros(batch, dtype=torch.bool, device=columns.device)
        self._columns.index_copy_(0, rows, columns)
        self._known.index_fill_(0, rows, True)


def _is_indexer(module: nn.Module) -> bool:
    return hasattr(module, "index_topk") and hasattr(module, "weights_proj")
