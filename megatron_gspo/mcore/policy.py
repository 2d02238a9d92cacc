"""The policy under training: model chunks, optimizer and schedule on this rank, as one value."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_gspo.config import (
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RoutingConfig,
)
from megatron_gspo.mcore.adam import adam_kernel_applies, use_adam_kernel
from megatron_gspo.mcore.checkpoint.initial_weights import load_megatron_weights
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.hf_weights import export_layers, export_weights, load_weights
from megatron_gspo.mcore.layers import transformer_engine_available
from megatron_gspo.mcore.lora.adapter_weights import (
    AdapterSource,
    adapter_layers,
    fill_adapters,
    first_values,
)
from megatron_gspo.mcore.lora.attach import adapters_off, attach_adapters
from megatron_gspo.mcore.lora.base_checksum import base_checksum
from megatron_gspo.mcore.lora.reduction import finalize_gradients
from megatron_gspo.mcore.megatron_options import MegatronOptions, construct, resolve_options
from megatron_gspo.mcore.model import build_model, torch_dtype, transformer_config
from megatron_gspo.mcore.offload import PolicyMemory
from megatron_gspo.mcore.policy_tensors import torch_optimizers
from megatron_gspo.mcore.process_groups import ProcessGroups
from megatron_gspo.mcore.protocols import MegatronOptimizer
from megatron_gspo.mcore.routing_replay.router_hooks import moe_layer_numbers
from megatron_gspo.mcore.user_optimizer import use_user_optimizer
from megatron_gspo.mcore.weight_sources import default_sources, export_source
from megatron_gspo.models import Family, ModelShape, family_of, read_config
from megatron_gspo.models.families import with_value_head
from megatron_gspo.routing_replay.routes import RouteShape
from megatron_gspo.weight_transport.weight_source import WeightSource


@dataclass
class Policy:
    """``chunks`` are wrapped by DistributedDataParallel; ``path`` is the Hugging Face directory
    that it came from.

    ``critic``: the value model that is trained with it (PPO), which is a ``Policy`` with a value
    head. ``memory`` moves what the policy holds between steps to host memory and back; the critic
    has its own. ``trained_lora``: of the adapters, if they are what is trained; ``is_base``: passes
    leave them out.
    """

    chunks: Sequence[MegatronModule]
    groups: ProcessGroups
    family: Family
    shape: ModelShape
    path: str
    optimizer: MegatronOptimizer | None = None
    scheduler: OptimizerParamScheduler | None = None
    critic: Policy | None = None
    trained_lora: LoRAConfig | None = None
    is_base: bool = False
    _checksum: str = field(init=False, default="")
    memory: PolicyMemory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = PolicyMemory(self.chunks, self.optimizer)

    @property
    def config(self) -> TransformerConfig:
        return unwrap(self.chunks[0]).config

    @property
    def routes(self) -> RouteShape | None:
        """Sizes of the samples' routes on this rank, which holds those of its own chunks' layers;
        None without experts."""
        shape = RouteShape.of_model(self.shape)
        if shape is None:
            return None
        return replace(
            shape, held=tuple(n for chunk in self.chunks for n in moe_layer_numbers(unwrap(chunk)))
        )

    @property
    def sources(self) -> tuple[WeightSource, ...]:
        """The ranks that send weights; see `mcore/weight_sources.py`."""
        return default_sources(self.groups, self.family)

    @property
    def trained(self) -> dict[str, Policy]:
        """The models that are trained, by the prefix of their names in checkpoints."""
        return {"": self} if self.critic is None else {"": self, "critic.": self.critic}

    def base(self) -> Policy:
        """This model without its adapters, as a frozen reference; no second model is made."""
        base_policy = replace(self, optimizer=None, scheduler=None, critic=None, is_base=True)
        base_policy.memory = self.memory
        return base_policy

    def active_adapters(self) -> AbstractContextManager[None]:
        """A context for passes of the model: without adapters where it is the `base`."""
        return adapters_off(self.chunks) if self.is_base else nullcontext()

    def gather_weights(self, *, always: bool = False) -> None:
        """Gather the updated weights on every rank, to read them without a forward pass.

        Needed with ``overlap_param_gather``: the optimizer step then leaves each rank with its own
        part of the new weights, and the next forward pass gathers the rest. always: also without
        it, where each rank has new values of its own part. A collective of all ranks.
        """
        for chunk in self.chunks:
            if getattr(chunk, "use_forward_hook", False) or (
                always and chunk.ddp_config.use_distributed_optimizer
            ):
                chunk.start_param_sync(force_sync=True)

    def weights(self, source: WeightSource | None = None) -> Iterator[tuple[str, Tensor]]:
        """Stream the weights under their Hugging Face names, merged with their adapters; a
        collective of all ranks.

        ``source``: only what it sends (`mcore/weight_sources.py`), to its rank alone; those of an
        update begin with number 0. None: all, to every rank.
        """
        chunks = self._chunks_to_send(source)
        if source is None:
            return export_weights(chunks, self.family, self.shape, self.groups)
        return export_source(source, chunks, self.family, self.shape, self.groups)

    def adapters(self, source: WeightSource | None = None) -> Iterator[tuple[str, Tensor]]:
        """Like `weights`, for the adapters alone, under PEFT's names (without its prefix).

        Needs ``trained_lora``.
        """
        chunks = self._chunks_to_send(source)
        assert self.trained_lora is not None
        layers = adapter_layers(chunks, self.trained_lora, self.family, self.shape, self.groups)
        if source is None:
            return export_layers(layers, self.shape, self.groups)
        return export_source(source, chunks, self.family, self.shape, self.groups, layers=layers)

    def set_adapters(self, source: AdapterSource) -> None:
        """Give the adapters and the optimizer's copies of them the values of ``source``, of which
        each rank takes its own slices."""
        assert self.trained_lora is not None
        chunks = [unwrap(chunk) for chunk in self.chunks]
        fill_adapters(source, chunks, self.trained_lora, self.family, self.shape, self.groups)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def base_checksum(self) -> str:
        """A checksum of the frozen weights that adapters belong to; "" without adapters. A
        collective of all ranks the first time."""
        if self.trained_lora is not None and not self._checksum:
            chunks = [unwrap(chunk) for chunk in self.chunks]
            self._checksum = base_checksum(chunks, self.family, self.shape, self.groups)
        return self._checksum

    def _chunks_to_send(self, source: WeightSource | None) -> list[GPTModel]:
        self.memory.restore_weights()
        # A collective: the sources after it send at the same time.
        if source is None or source.number == 0:
            self.gather_weights()
        return [unwrap(chunk) for chunk in self.chunks]


@dataclass(frozen=True)
class TrainedParts:
    """What is trained besides or in place of the model's weights: a value head, and adapters.

    seed: of the adapters' first values.
    """

    value_head: bool = False
    lora: LoRAConfig | None = None
    seed: int = 0


def build_policy(
    model: ModelConfig,
    parallel: ParallelConfig,
    groups: ProcessGroups,
    *,
    optimizer: OptimizerConfig | None,
    total_steps: int = 1,
    parts: TrainedParts = TrainedParts(),
    options: MegatronOptions = MegatronOptions(),
) -> Policy:
    """Build the model of a Hugging Face directory, load its weights and create its optimizer.

    With ``model.init: random`` only ``config.json`` is read, and Megatron initializes the weights;
    with ``model.megatron_path`` the weights are those of a Megatron checkpoint.
    Without ``optimizer`` (a frozen reference policy) there are no gradient buffers.
    ``total_steps``: optimizer steps of the learning-rate schedule. ``parts``: with a value head it
    is a value model of the same sizes; with adapters, which torch layers alone can have, the
    weights are frozen. ``options``: passed through to Megatron's config classes.
    """
    path = model.path
    is_pretrained = model.init == "pretrained"
    lora = parts.lora
    family, shape = family_of(read_config(path))
    shape = with_value_head(shape) if parts.value_head else shape
    model = replace(model, implementation="torch") if lora is not None else model
    chunks = build_model(shape, parallel, model, groups, options)
    if model.megatron_path is not None and is_pretrained:
        load_megatron_weights(chunks, model.megatron_path, shape)
    elif is_pretrained:
        load_weights(chunks, path, family, shape, groups)
    if lora is not None:
        attach_adapters(chunks, lora, family, shape, groups)
        fill_adapters(first_values(parts.seed), chunks, lora, family, shape, groups)
    if optimizer is None:
        for chunk in chunks:
            chunk.requires_grad_(False)
        return Policy(chunks, groups, family, shape, path)
    config = chunks[0].config
    ddp = ddp_config(parallel, options)
    wrapped = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]
    if not is_pretrained:
        for chunk in wrapped:
            chunk.broadcast_params()
    _connect(config, wrapped, parallel)
    built = get_megatron_optimizer(optimizer_config(optimizer, model, parallel, options), wrapped)
    if optimizer.function is not None:
        use_user_optimizer(built, optimizer)
    elif adam_kernel_applies(built):
        use_adam_kernel(built, optimizer.clip_grad)
    else:
        _fuse(built)
    _check_gradient_norm(built)
    config.grad_scale_func = built.scale_loss
    schedule = _schedule(built, optimizer, total_steps)
    return Policy(wrapped, groups, family, shape, path, built, schedule, trained_lora=lora)


def check_megatron_options(
    given: Mapping[str, object],
    shape: ModelShape,
    parallel: ParallelConfig,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    routing: RoutingConfig,
) -> MegatronOptions:
    """Resolve the ``megatron`` section and let Megatron's own config classes check it; nothing is
    allocated.

    Raises ``ConfigError`` naming the option, or with Megatron's message.
    """
    options = resolve_options(
        given,
        uses_routes=shape.is_moe and routing.uses_routes,
        fused=transformer_engine_available(),
    )
    if given:
        transformer_config(shape, parallel, model, options)
        optimizer_config(optimizer, model, parallel, options)
        ddp_config(parallel, options)
    return options


def ddp_config(
    parallel: ParallelConfig,
    options: MegatronOptions = MegatronOptions(),
) -> DistributedDataParallelConfig:
    """Megatron's config of gradient buffers and their reduction."""
    keywords = dict(
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        grad_reduce_in_fp32=True,
        check_for_nan_in_grad=False,  # two host synchronisations a bucket; the gradient norm is checked instead
    )
    return construct(DistributedDataParallelConfig, keywords, options.ddp)


def _connect(
    config: TransformerConfig, chunks: list[DistributedDataParallel], parallel: ParallelConfig
) -> None:
    """Set the functions that Megatron's schedule calls to reduce gradients and gather
    parameters.
    """
    config.finalize_model_grads_func = finalize_gradients
    if parallel.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in chunks]
        config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
        if parallel.overlap_param_gather:
            config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
        if len(chunks) == 1:
            for name in ("no_sync_func", "grad_sync_func", "param_sync_func"):
                if getattr(config, name):
                    setattr(config, name, getattr(config, name)[0])


def optimizer_config(
    optimizer: OptimizerConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    options: MegatronOptions = MegatronOptions(),
) -> MegatronOptimizerConfig:
    """Megatron's config of the optimizer and its wrappers."""
    dtype = torch_dtype(model)
    keywords = dict(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=optimizer.adam_eps,
        clip_grad=optimizer.clip_grad,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_param_gather=parallel.overlap_param_gather,
    )
    return construct(MegatronOptimizerConfig, keywords, options.optimizer)


def _fuse(optimizer: MegatronOptimizer) -> None:
    """Let torch's Adam, Megatron's choice without Transformer Engine and Apex, run as one
    kernel a group.
    """
    for inner in torch_optimizers(optimizer):
        if isinstance(inner, torch.optim.Adam):  # AdamW is one of it
            for group in inner.param_groups:
                group.update(fused=True, foreach=False)


def _check_gradient_norm(optimizer: MegatronOptimizer) -> None:
    """Stop before a step into NaN weights: once a step and, because the norm is that of all
    ranks, on every rank.
    """
    gradient_norm = optimizer.get_grad_norm

    def checked() -> float:
        norm = gradient_norm()
        if not math.isfinite(norm):
            raise RuntimeError(f"the grad norm is {float(norm)}")
        return norm

    optimizer.get_grad_norm = checked


def _schedule(
    optimizer: MegatronOptimizer, section: OptimizerConfig, total_steps: int
) -> OptimizerParamScheduler:
    warmup = section.lr_warmup_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=section.lr
        / (warmup + 1),  # not 0, so that the first update of a warm-up has an effect
        max_lr=section.lr,
        min_lr=section.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(total_steps, warmup + 1),
        lr_decay_style=section.lr_decay_style,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
