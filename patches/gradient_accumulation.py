"""Add weight gradients to Megatron's buffers by torch's product where Apex is not installed.

Upstream: megatron-core 0.16.1 to 0.19.2, ``megatron/core/tensor_parallel/layers.py``: with
``gradient_accumulation_fusion`` a linear layer is not built without Apex's kernel. The output layer
is one, so that Transformer Engine's layers, which need no Apex for it, can't have it either. Delete
when: upstream multiplies by torch.
"""

from __future__ import annotations

from torch import Tensor

from megatron_gspo.parallel.main_gradients import add_product


class WeightGradients:
    """In place of Apex's module ``fused_weight_gradient_mlp_cuda``."""

    @staticmethod
    def wgrad_gemm_accum_fp32(rows: Tensor, grad: Tensor, total: Tensor) -> None:
        """``total`` [b, a] += ``grad.t() @ rows``; ``rows`` [n, a], ``grad`` [n, b]."""
        if total.is_cuda or total.dtype == rows.dtype:
            add_product(total, grad.t(), rows)
        else:
            total += grad.t() @ rows  # a CPU's product has one dtype

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def apply() -> None:
    """Give the layers torch's product, unless Apex is there."""
    import megatron.core.tensor_parallel.layers as layers

    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = WeightGradients
        layers._grad_accum_fusion_available = True
