"""Core attention with a learned sink for each head; see ``mcore/sinks.py``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_gspo.mcore.attention import PackedAttention
from megatron_gspo.mcore.norms import device_of
from megatron_gspo.mcore.protocols import ShardOffsets


class SinkAttention(PackedAttention):
    """``PackedAttention`` with sinks under the name that Megatron gives them,
    ``softmax_offset``; sharded by heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: object,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection,
        **kwargs: object,
    ) -> None:
        super().__init__(config, softmax_scale=softmax_scale, pg_collection=pg_collection)
        heads = config.num_attention_heads // pg_collection.tp.size()
        offset = torch.empty(heads, dtype=config.params_dtype, device=device_of(config))
        self.softmax_offset = torch.nn.Parameter(offset)
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        if config.perform_initialization:
            config.init_method(self.softmax_offset)

    @property
    def sinks(self) -> Tensor:  # type: ignore[override]
        return self.softmax_offset

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: ShardOffsets = (),
        metadata: Mapping[str, object] | None = None,
    ) -> ShardedStateDict:
        """The sinks as a tensor that is cut over the tensor-parallel ranks."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"softmax_offset": 0}, sharded_offsets
        )
