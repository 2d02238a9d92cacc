"""Define a name that Megatron-Core leaves undefined when Transformer Engine is absent.

Upstream: megatron-core 0.16.1, ``megatron/core/transformer/moe/moe_utils.py``: ``te_general_gemm``
is imported inside a ``try`` and used outside of it, so the router's first forward pass raises
``NameError``. Delete when: the oldest supported megatron-core defines it (0.17 does).
"""

from __future__ import annotations


def apply() -> None:
    """Bind ``moe_utils.te_general_gemm`` to None, the value that its users test for."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
