"""Functions that run one fused kernel on a GPU, whose saved tensors differ from those of their
parts.

Torch chooses the kernel by the GPU's properties, or composes the function from smaller operations
if there is none. Here the kernel's own operation is called, so that what it saves for the backward
is what a GPU would hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_gspo import kernels
from megatron_gspo.tools.rehearse.host_log import HostLog

_HALF = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256  # of the flash kernel


@contextlib.contextmanager
def fused_functions(host: HostLog) -> Iterator[None]:
    """Within the context the functions of ``_FUNCTIONS`` call their GPU kernel for device
    tensors, and the kernels of ``megatron_gspo/kernels`` are chosen unless they are off.
    """
    before = {name: getattr(F, name) for name in _FUNCTIONS}
    can_compile = kernels.can_compile
    for name, make in _FUNCTIONS.items():
        setattr(F, name, make(before[name], host))
    kernels.can_compile = lambda: True  # type: ignore[assignment]
    try:
        yield
    finally:
        kernels.can_compile = can_compile
        for name, function in before.items():
            setattr(F, name, function)


def _rms_norm(original: Any, host: HostLog) -> Any:
    def rms_norm(
        x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if x.device.type != "cuda" or (weight is not None and weight.dtype != x.dtype):
            return original(x, shape, weight, eps)
        return _FusedRMSNorm.apply(x, weight)

    return rms_norm


_KERNELS = torch.library.Library("rehearsal", "DEF")
_KERNELS.define("rms_norm(Tensor x, Tensor? weight) -> (Tensor, Tensor)")
_KERNELS.define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor inverse, Tensor? weight) -> (Tensor, Tensor)"
)


@torch.library.register_fake("rehearsal::rms_norm", lib=_KERNELS)
def _rms_norm_shapes(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    inverse = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return torch.empty_like(x), inverse


@torch.library.register_fake("rehearsal::rms_norm_backward", lib=_KERNELS)
def _rms_norm_backward_shapes(
    grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(0) if weight is None else torch.empty_like(weight)


class _FusedRMSNorm(torch.autograd.Function):
    """What torch's CUDA kernel saves and returns; its CPU build composes the function even of
    fake CUDA tensors.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        out, inverse = torch.ops.rehearsal.rms_norm(x, weight)
        ctx.save_for_backward(x, inverse, *(() if weight is None else (weight,)))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, inverse, *weights = ctx.saved_tensors
        weight = weights[0] if weights else None
        grad_x, grad_weight = torch.ops.rehearsal.rms_norm_backward(grad, x, inverse, weight)
        return grad_x, None if weight is None else grad_weight


def _attention(original: Any, host: HostLog) -> Any:
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        if query.device.type != "cuda":
            return original(query, key, value, attn_mask, dropout_p, is_causal, **options)
        scale = options.get("scale")
        enable_gqa = options.get("enable_gqa", False)
        if attn_mask is None and query.dtype in _HALF and query.shape[-1] <= _LARGEST_HEAD:
            return torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
        if attn_mask is not None and enable_gqa and query.shape[1] != key.shape[1]:
            host.find(
                "slow_attention",
                "a mask with grouped queries: torch multiplies whole score matrices",
            )
        if enable_gqa:
            key, value = (
                x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value)
            )
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )[0]

    return scaled_dot_product_attention


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as the efficient kernel takes it: what is added to the scores."""
    bias = mask
    if mask.dtype is torch.bool:
        bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(
            ~mask, float("-inf")
        )
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


_FUNCTIONS: dict[str, Callable[[Any, HostLog], Any]] = {
    "rms_norm": _rms_norm,
    "scaled_dot_product_attention": _attention,
}
