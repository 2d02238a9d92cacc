"""Sections `model` and `parallel`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from megatron_gspo.config.paths import UserPath


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model and how its layers are built."""

    path: UserPath
    """Hugging Face directory of config, tokenizer and weights (docs/models.md)."""
    megatron_path: UserPath | None = None
    """Megatron checkpoint of the initial weights (docs/conversion.md)."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Load the initial weights, or draw them from `seed`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of parameters and activations; log-probs are float32."""
    implementation: Literal["auto", "transformer_engine", "torch"] = "auto"
    """Layers; `auto` is Transformer Engine's on a GPU if installed."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Recompute nothing, core attention, or whole layers."""
    recompute_num_layers: Annotated[int, Ge(1)] | None = None
    """Layers per recomputed unit with `full`; null is 1."""
    expert_bias_update_rate: Annotated[float, Ge(0)] = 0.0
    """Step of the routers' expert biases (docs/models.md); 0 freezes them."""

    @property
    def reads_files(self) -> bool:
        """Whether the initial weights are those of the files in `path`."""
        return self.init == "pretrained" and self.megatron_path is None


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model and the batch are divided over the processes."""

    tensor_model_parallel_size: Annotated[int, Ge(1)] = 1
    """Tensor-parallel ranks, TP (docs/scaling.md)."""
    pipeline_model_parallel_size: Annotated[int, Ge(1)] = 1
    """Pipeline stages, PP."""
    virtual_pipeline_model_parallel_size: Annotated[int, Ge(2)] | None = None
    """Model chunks per pipeline stage, VP; null is 1."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer."""
    account_for_loss_in_pipeline_split: bool = False
    """Count output layer and loss as a layer."""
    context_parallel_size: Annotated[int, Ge(1)] = 1
    """Context-parallel ranks, CP."""
    expert_model_parallel_size: Annotated[int, Ge(1)] = 1
    """Expert-parallel ranks, EP."""
    expert_tensor_parallel_size: Annotated[int, Ge(1)] | None = None
    """Ranks of each expert, ETP; null is 1."""
    sequence_parallel: bool | None = None
    """Split activations over TP; null is on if TP > 1."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    """Collective that sends tokens to their experts."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Backend of collectives; `auto` is nccl on a GPU."""
    distributed_timeout_minutes: Annotated[float, Gt(0)] = 30.0
    """Timeout of collectives."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state and master weights over data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Overlap gradient reduction with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap parameter gathering with the forward pass; needs `overlap_grad_reduce`."""

    @property
    def use_sequence_parallel(self) -> bool:
        """`sequence_parallel`, null resolved."""
        on = self.sequence_parallel
        return self.tensor_model_parallel_size > 1 if on is None else on

    @property
    def expert_tensor_size(self) -> int:
        """`expert_tensor_parallel_size`, null resolved."""
        return self.expert_tensor_parallel_size or 1

    @property
    def extra_pipeline_layers(self) -> int:
        """Embedding and loss that count as layers in the pipeline split: 0, 1 or 2."""
        return int(self.account_for_embedding_in_pipeline_split) + int(
            self.account_for_loss_in_pipeline_split
        )

    @property
    def model_parallel_size(self) -> int:
        """Ranks of one model replica: TP x PP x CP."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    def data_parallel_size(self, world_size: int) -> int:
        """Model replicas among `world_size` ranks; `Config.check` verifies that it divides."""
        return world_size // self.model_parallel_size

    @property
    def sequence_multiple(self) -> int:
        """Every packed sequence is padded to a multiple of this number of tokens: 2 x CP, or 1
        without CP.
        """
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def total_multiple(self) -> int:
        """A packed micro-batch is padded to a multiple of this, so that all CP x TP ranks hold
        equal parts.
        """
        scatter = self.tensor_model_parallel_size if self.use_sequence_parallel else 1
        return self.sequence_multiple * scatter
