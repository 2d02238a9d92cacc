"""The scale of adapters."""

from __future__ import annotations

import pytest

from megatron_gspo.config import LoRAConfig


def test_scales_by_hand():
    assert LoRAConfig(rank=8, alpha=16.0).scale == 2.0
    assert LoRAConfig(rank=16, alpha=8.0, rslora=True).scale == 2.0
    assert LoRAConfig(rank=8, alpha=16.0, rslora=True).scale == pytest.approx(5.656854249492381)
    assert LoRAConfig(rank=1).is_on and not LoRAConfig().is_on
