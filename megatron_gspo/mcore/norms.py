"""The norms of the torch layers."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_gspo.mcore.operators import rms_norm


class RMSNorm(torch.nn.RMSNorm):
    """Torch's RMSNorm, marked so that Megatron sums its gradient under sequence parallelism.

    Megatron's own torch norm doesn't support sequence parallelism, which MoE with tensor
    parallelism requires. With ``layernorm_zero_centered_gamma`` it multiplies by 1 + weight, a sum
    that low precision would round off.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device_of(config))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.zero_centred = config.layernorm_zero_centered_gamma
        if self.zero_centred:
            torch.nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if not self.zero_centred:
            return rms_norm(x, self.weight, self.eps or 0.0)
        dtype = torch.promote_types(x.dtype, torch.float32)
        return rms_norm(x.to(dtype), 1.0 + self.weight.to(dtype), self.eps or 0.0).to(x.dtype)


def device_of(config: TransformerConfig) -> int | None:
    """Where a module's parameters are built; None is the default device: the CPU, or the meta
    device.
    """
    return None if config.use_cpu_initialization else torch.cuda.current_device()
