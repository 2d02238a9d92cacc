"""What mixers with a recurrent state have in common: packed sequences in chunks, and every
parallelism by groups of heads.

The heads form groups, which share what a group's heads read. The rows of the first product are
ordered by group, so that each tensor- and context-parallel rank has whole groups and its own rows
are contiguous.

Under context parallelism the ranks exchange groups for tokens (all-to-all) before the convolution
and back after the recurrence: in between a rank has whole sequences, so that no state crosses
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_gspo.mcore.attention import PackedSequences
from megatron_gspo.mcore.chunk_layout import ChunkLayout
from megatron_gspo.mcore.norms import device_of
from megatron_gspo.mcore.protocols import ShardOffsets


class NamedParameters(torch.nn.Module):
    """Parameters under the names that they have in Megatron's layer."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter


class ChunkedMixer(MegatronModule):
    """Built and called as Megatron's ``SelfAttention``. It has the first and the last product; the
    class of a family has the parameters between them, and names those that tensor parallelism cuts
    along their rows in ``row_sharded``.
    """

    row_sharded: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        *,
        groups: int,
        projected: int,
        outputs: int,
        groups_are: str,
    ) -> None:
        """groups: of the whole layer; projected, outputs: channels that the first product makes and
        the last one reads. groups_are: what they are, for messages.

        Raises ValueError where the groups are no multiple of tensor- times context-parallel size.
        """
        super().__init__(config)
        self.tp_group = pg_collection.tp
        self.cp_group = pg_collection.cp
        ranks = self.tp_group.size() * self.cp_group.size()
        if groups % ranks:
            raise ValueError(
                f"tensor- times context-parallel size = {ranks} does not divide the {groups}"
                f" {groups_are}; lower one of them"
            )
        self.local_groups = groups // self.tp_group.size()
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            projected,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )
        self.out_proj = RowParallelLinear(
            outputs,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            bias=False,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def _empty(self, *sizes: int) -> Tensor:
        return torch.empty(*sizes, dtype=self.config.params_dtype, device=device_of(self.config))

    def _sharded(self, *sizes: int) -> torch.nn.Parameter:
        """A parameter of which each tensor-parallel rank has rows of its own."""
        parameter = torch.nn.Parameter(self._empty(*sizes))
        set_tensor_model_parallel_attributes(parameter, True, dim=0, stride=1)
        return parameter

    def _layout(self, sequences: object, kernel: int) -> ChunkLayout:
        """The chunks of a micro-batch for a convolution over ``kernel`` tokens."""
        if not isinstance(sequences, PackedSequences):
            raise TypeError(
                f"{type(self).__name__} needs packed_seq_params of"
                " mcore.attention.packed_sequences()"
            )
        return sequences.chunks(kernel - 1)

    def _groups(self, x: Tensor) -> Tensor:
        """All groups of this rank's tokens [t, groups, w] to this rank's groups of all tokens [t *
        cp, groups / cp, w].
        """
        size = self.cp_group.size()
        if size == 1:
            return x
        by_rank = x.reshape(x.shape[0], size, -1).transpose(0, 1).reshape(x.shape[0] * size, -1)
        return all_to_all(self.cp_group, by_rank).view(len(by_rank), -1, x.shape[2])

    def _tokens(self, x: Tensor) -> Tensor:
        """The inverse of ``_groups`` for ``x`` [t * cp, w]: [t, cp * w]."""
        size = self.cp_group.size()
        if size == 1:
            return x
        return all_to_all(self.cp_group, x).view(size, -1, x.shape[1]).transpose(0, 1).flatten(1)

    def _local_rows(self, parameter: Tensor) -> Tensor:
        """The rows of the groups that this rank has between ``_groups`` and ``_tokens``."""
        return parameter.chunk(self.cp_group.size())[self.cp_group.rank()]

    def _recomputed(self, function: Callable[..., Tensor], *arguments: object) -> Tensor:
        """Nothing inside is kept for the backward, which computes it again, unless the whole layer
        does that already.
        """
        if self.config.recompute_granularity == "full" or not torch.is_grad_enabled():
            return function(*arguments)
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: ShardOffsets = (),
        metadata: Mapping[str, object] | None = None,
        **_: object,
    ) -> ShardedStateDict:
        """The parameters for Megatron's distributed checkpoints."""
        assert metadata is not None, "Megatron names the group of the replicas in it"
        groups = dict(tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])
        parameters = {name: value for name, value in self.named_parameters() if "proj" not in name}
        state = make_sharded_tensors_for_checkpoint(
            parameters, prefix, dict.fromkeys(self.row_sharded, 0), sharded_offsets, **groups
        )
        for name in ("in_proj", "out_proj"):
            state |= sharded_state_dict_default(
                getattr(self, name),
                f"{prefix}{name}.",
                sharded_offsets,
                metadata,
                tp_group=self.tp_group,
            )
        return state
