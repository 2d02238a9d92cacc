"""Parts of this rank's tensors, by their places in the tensors of a distributed checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_gspo.mcore.checkpoint.tensor_boxes import Box


@dataclass(frozen=True)
class Piece:
    """``values`` [n] of a ``box`` of the tensor ``key`` of the sizes ``whole``. is_padded: other
    layouts pad it to another size."""

    key: str
    whole: tuple[int, ...]
    box: Box
    values: Tensor
    is_padded: bool

    @property
    def is_state(self) -> bool:
        """Whether it is neither of the model's weights nor of the main weights."""
        return "optimizer.state." in self.key and "optimizer.state.param." not in self.key

    @property
    def memory(self) -> tuple[object, ...]:
        """A key that pieces of the same memory share: main weights in float32 are a view of the
        model's.
        """
        values = self.values
        return (
            values.untyped_storage()._cdata,
            values.storage_offset(),
            values.dtype,
            self.box.sizes,
        )


def sharded_tensors(chunk: GPTModel) -> Iterator[tuple[Tensor, ShardedTensor]]:
    """Each parameter (or buffer) of an unwrapped chunk with Megatron's description of it: two of a
    gated ``linear_fc1``."""
    for value in chunk.sharded_state_dict().values():
        if isinstance(value, ShardedTensorFactory):
            for sharded in nested_values(value.build()):
                yield value.data, sharded
        elif isinstance(value, ShardedTensor):
            yield value.data, value
