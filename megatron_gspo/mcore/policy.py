"""The policy under training: model chunks, optimizer and schedule on this rank, as one value."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.hf_weights import export_weights, load_weights
from megatron_gspo.mcore.model import ModelSettings, build_model
from megatron_gspo.mcore.process_groups import Groups, Layout
from megatron_gspo.models import Family, ModelShape, family_of, read_config


@dataclass(frozen=True)
class OptimizerSettings:
    """Adam and its schedule, in optimizer steps. ``schedule``: ``constant``, ``linear`` or ``cosine``."""

    lr: float
    min_lr: float = 0.0
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 1
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0


@dataclass(frozen=True)
class DataParallelSettings:
    """Megatron's DistributedDataParallel: optimizer sharding and communication overlap."""

    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False


@dataclass
class Policy:
    """``chunks`` are wrapped by DistributedDataParallel; ``path`` is the Hugging Face directory that it came from."""

    chunks: list[Any]
    groups: Groups
    family: Family
    shape: ModelShape
    path: str
    optimizer: Any = None
    scheduler: Any = None

    @property
    def config(self) -> Any:
        return unwrap(self.chunks[0]).config

    def gather_weights(self) -> None:
        """Bring every rank's copy of the weights up to date, for who reads them without a forward pass.

        Only under ``overlap_param_gather`` is there anything to do: the optimizer step then leaves each rank with its
        own part of the new weights, and the rest follows during the next forward pass. A collective of all ranks.
        """
        for chunk in self.chunks:
            if getattr(chunk, "use_forward_hook", False):
                chunk.start_param_sync(force_sync=True)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the weights under their Hugging Face names; a collective of all ranks."""
        self.gather_weights()
        return export_weights([unwrap(chunk) for chunk in self.chunks], self.family, self.shape, self.groups)


def build_policy(path: str, layout: Layout, groups: Groups, *, model: ModelSettings,
                 data_parallel: DataParallelSettings, optimizer: OptimizerSettings | None,
                 pretrained: bool = True) -> Policy:
    """Build the model of a Hugging Face directory in this layout, load its weights and make its optimizer.

    With ``pretrained=False`` only ``config.json`` is read and the weights are drawn by Megatron's initialisation.
    Without ``optimizer`` (a frozen reference policy) there are no gradient buffers either.
    """
    family, shape = family_of(read_config(path))
    chunks = build_model(shape, layout, model, groups)
    if pretrained:
        load_weights(chunks, path, family, shape, groups)
    if optimizer is None:
        for chunk in chunks:
            chunk.requires_grad_(False)
        return Policy(chunks, groups, family, shape, path)
    config = chunks[0].config
    wrapped = [_wrap(chunk, config, data_parallel, first=i == 0) for i, chunk in enumerate(chunks)]
    if not pretrained:
        for chunk in wrapped:
            chunk.broadcast_params()
    _connect(config, wrapped, data_parallel)
    adam = get_megatron_optimizer(_optimizer_config(optimizer, model.dtype, data_parallel), wrapped)
    _fuse(adam)
    config.grad_scale_func = adam.scale_loss
    return Policy(wrapped, groups, family, shape, path, adam, _schedule(adam, optimizer))


def _wrap(chunk: Any, config: Any, settings: DataParallelSettings, *, first: bool) -> DistributedDataParallel:
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=settings.distributed_optimizer,
        overlap_grad_reduce=settings.overlap_grad_reduce,
        overlap_param_gather=settings.overlap_param_gather,
        grad_reduce_in_fp32=True,
        check_for_nan_in_grad=True,  # stop, rather than step into NaN weights
    )
    return DistributedDataParallel(config, ddp, chunk, disable_bucketing=not first)


def _connect(config: Any, chunks: list[Any], settings: DataParallelSettings) -> None:
    """Give Megatron's schedule the hooks that it calls at the end of the backward pass."""
    config.finalize_model_grads_func = finalize_model_grads
    if settings.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in chunks]
        config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
        if settings.overlap_param_gather:
            config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
        if len(chunks) == 1:
            for name in ("no_sync_func", "grad_sync_func", "param_sync_func"):
                if getattr(config, name):
                    setattr(config, name, getattr(config, name)[0])


def _optimizer_config(settings: OptimizerSettings, dtype: torch.dtype,
                      data_parallel: DataParallelSettings) -> OptimizerConfig:
    keywords: dict[str, Any] = dict(
        optimizer="adam", lr=settings.lr, min_lr=settings.min_lr, weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1, adam_beta2=settings.adam_beta2, adam_eps=settings.adam_eps,
        clip_grad=settings.clip_grad, params_dtype=dtype, bf16=dtype == torch.bfloat16,
        use_distributed_optimizer=data_parallel.distributed_optimizer,
        overlap_param_gather=data_parallel.overlap_param_gather,
    )
    known = inspect.signature(OptimizerConfig.__init__).parameters
    return OptimizerConfig(**{key: value for key, value in keywords.items() if key in known})


def _fuse(adam: Any) -> None:
    """Let torch's Adam, Megatron's choice without Transformer Engine and Apex, run as one kernel a group."""
    for part in getattr(adam, "chained_optimizers", [adam]):
        if isinstance(part.optimizer, torch.optim.Adam):  # AdamW is one of it
            for group in part.optimizer.param_groups:
                group.update(fused=True, foreach=False)


def _schedule(adam: Any, settings: OptimizerSettings) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        adam,
        init_lr=settings.lr / (settings.warmup_steps + 1),  # not 0: the first update of a warm-up should do something
        max_lr=settings.lr,
        min_lr=settings.min_lr, lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(settings.total_steps, settings.warmup_steps + 1), lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay, end_wd=settings.weight_decay, wd_incr_steps=0, wd_incr_style="constant",
    )
