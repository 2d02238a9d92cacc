"""Corrections to upstream packages, applied at run time: one file per defect, each version-guarded
and idempotent.

``patches/README.md`` lists every one of them with its version range, the upstream place and when to
delete it. A patch never edits a file on disk. Each module offers ``apply()``; what it changes
carries a mark, so that a second call finds the work done.
"""

from __future__ import annotations


def apply_patches() -> None:
    """Apply every patch that this machine and these versions need.

    On a machine without a GPU it must run before the first ``import megatron.core``: Megatron reads
    device names and stream types while it is being imported. Raises ``ImportError`` with the name
    of an upstream symbol that is missing.
    """
    from megatron_gspo.patches import (
        expert_gradients,
        gradient_accumulation,
        gradient_norm,
        megatron_on_cpu,
        moe_retained_activations,
        moe_uneven_collectives,
        quiet,
        te_general_gemm,
    )

    for patch in (
        quiet,
        megatron_on_cpu,
        te_general_gemm,
        moe_uneven_collectives,
        moe_retained_activations,
        expert_gradients,
        gradient_norm,
        gradient_accumulation,
    ):
        patch.apply()
