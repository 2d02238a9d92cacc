"""Attention with sinks as a Megatron module; ``test_attention.py`` has its values."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron_gspo.mcore.sink_attention import SinkAttention


def test_each_tensor_parallel_rank_has_the_sinks_of_its_heads():
    config = SimpleNamespace(
        attention_dropout=0.0,
        kv_channels=8,
        num_attention_heads=6,
        params_dtype=torch.float64,
        use_cpu_initialization=True,
        perform_initialization=True,
        init_method=lambda x: x.data.fill_(2.0),
    )
    groups = SimpleNamespace(cp=None, tp=SimpleNamespace(size=lambda: 2))
    attention = SinkAttention(config, 1, None, "self", pg_collection=groups)
    assert [name for name, _ in attention.named_parameters()] == ["softmax_offset"]
    assert torch.equal(attention.sinks, torch.full((3,), 2.0, dtype=torch.float64))
    assert attention.sinks.tensor_model_parallel and attention.sinks.partition_dim == 0
