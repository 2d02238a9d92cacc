"""The reference computes in float64 where Transformers asks for float32."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny_models import save_tiny_model
from tests.support.transformers_reference import DoublePrecision, load_reference


@pytest.mark.parametrize("kind", ["moe", "next", "qwen35_moe", "deepseek"])
def test_norms_are_not_rounded_to_float32(kind, tmp_path):
    model = load_reference(save_tiny_model(tmp_path, kind))
    errors: list[float] = []

    def compare(norm, inputs, output):
        [x] = inputs
        weight = norm.weight + (0.0 if kind in ("moe", "deepseek") else 1.0)
        expected = (
            x / (x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt() * weight
        )
        errors.append(float((output - expected).abs().max()))

    for name, module in model.named_modules():
        if name.endswith("input_layernorm"):
            module.register_forward_hook(compare)
    model(input_ids=torch.tensor([[5, 7, 11]]), use_cache=False)
    assert len(errors) == 4 and max(errors) < 1e-14


def test_only_float64_is_kept():
    single = torch.ones(2, dtype=torch.float16)
    double = torch.ones(2, dtype=torch.float64)
    with DoublePrecision():
        assert single.float().dtype is torch.float32
        assert double.float().dtype is double.to(torch.float32).dtype is torch.float64
        assert torch.softmax(double, dim=0, dtype=torch.float32).dtype is torch.float64
    assert double.float().dtype is torch.float32
