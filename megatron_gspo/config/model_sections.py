"""Sections `model` and `parallel`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model and how its layers are built."""

    path: str
    """Hugging Face model directory with config.json, tokenizer and safetensors files."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Initial weights: `pretrained` loads them from `path`; `random` reads config.json only and draws them from
    `seed`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of parameters and activations. Log-probs are always computed in float32."""
    implementation: Literal["auto", "transformer_engine", "torch"] = "auto"
    """Layer implementation; `auto` is Transformer Engine on a GPU where it is installed, otherwise torch."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activation recomputation: none, core attention only (`selective`), or whole layers (`full`)."""
    recompute_num_layers: Annotated[int, Ge(1)] | None = None
    """Layers per recomputed unit, with `recompute_granularity: full`; null is 1."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model and the batch are divided over the processes."""

    tensor_model_parallel_size: Annotated[int, Ge(1)] = 1
    """Tensor-parallel ranks (TP), which split each attention and dense layer."""
    pipeline_model_parallel_size: Annotated[int, Ge(1)] = 1
    """Pipeline stages (PP)."""
    virtual_pipeline_model_parallel_size: Annotated[int, Ge(2)] | None = None
    """Model chunks per pipeline stage (interleaved schedule); null is one, the plain 1F1B schedule."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one layer when layers are divided over pipeline stages."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer and the loss as one layer when layers are divided over pipeline stages."""
    context_parallel_size: Annotated[int, Ge(1)] = 1
    """Context-parallel ranks (CP), which split the tokens of each sequence."""
    expert_model_parallel_size: Annotated[int, Ge(1)] = 1
    """Expert-parallel ranks (EP), which split the experts of each layer."""
    expert_tensor_parallel_size: Annotated[int, Ge(1)] | None = None
    """Tensor-parallel ranks of each expert (ETP); null is 1, whatever the tensor-parallel size is."""
    sequence_parallel: bool | None = None
    """Split activations along the tokens between tensor-parallel regions; null enables it where TP > 1."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    """Collective that sends tokens to the ranks of their experts."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """torch.distributed backend; `auto` is nccl on a GPU and gloo otherwise."""
    distributed_timeout_minutes: Annotated[float, Gt(0)] = 30.0
    """Timeout of collectives and of process-group initialization, in minutes."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state and float32 master weights over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Overlap gradient reduction with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the gathering of updated parameters with the next forward pass; needs `overlap_grad_reduce`."""

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
        return int(self.account_for_embedding_in_pipeline_split) + int(self.account_for_loss_in_pipeline_split)

    @property
    def model_parallel_size(self) -> int:
        """Ranks of one model replica: TP x PP x CP."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Model replicas among `world_size` ranks; `Config.check` verifies that it divides."""
        return world_size // self.model_parallel_size

    @property
    def sequence_multiple(self) -> int:
        """Every packed sequence is padded to a multiple of this number of tokens: 2 x CP, or 1 without CP."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def total_multiple(self) -> int:
        """A packed micro-batch is padded to a multiple of this, so that all CP x TP ranks hold equal parts."""
        scatter = self.tensor_model_parallel_size if self.use_sequence_parallel else 1
        return self.sequence_multiple * scatter
