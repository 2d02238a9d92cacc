"""The GPU benchmark: its rows at tiny sizes on a CPU, its operations by hand, its config, the
names of GPUs.
"""

from __future__ import annotations

import gc
import weakref

import pytest

from benchmarks import gpu
from benchmarks.gpu import (
    TINY,
    head_flops,
    layer_flops,
    measure,
    write_config,
)
from megatron_gspo.mcore import policy as policy_module
from megatron_gspo.models import family_of, read_config


def test_every_row_is_measured():
    rows = list(measure(TINY, peak=0.5, rehearsed=123))
    assert [(row.name, row.implementation) for row in rows] == [
        ("matrix product", "torch"),
        ("head", "torch"),
        ("layer", "torch"),
        ("training step", "torch"),
    ]
    assert [row.tokens for row in rows] == [64, 32, 32, 64]
    assert all(
        row.milliseconds.count == TINY.repeats and row.milliseconds.median > 0 for row in rows
    )
    assert all(
        row.share_of_peak == pytest.approx(row.tflops / 0.5) and row.peak_bytes is None
        for row in rows
    )
    assert [row.rehearsed_bytes for row in rows] == [None, None, None, 123]


def test_the_memory_of_one_kind_of_layers_is_not_measured_with_the_other(monkeypatch, request):
    """With automatic garbage collection it might be there or not."""
    gc.disable()
    request.addfinalizer(gc.enable)
    alive = []
    real = policy_module.build_policy

    def build(*given, **options):
        assert not any(chunk() for chunk in alive), "the first policy still holds memory"
        policy = real(*given, **options)
        alive.append(weakref.ref(policy.chunks[0]))
        return policy

    monkeypatch.setattr(policy_module, "build_policy", build)
    monkeypatch.setattr(gpu, "IMPLEMENTATIONS", ("torch", "torch"))
    assert len(list(measure(TINY, peak=None))) == 6 and len(alive) == 2


def test_operations_by_hand(tmp_path):
    """Hidden 32, 4 heads and 2 groups of 16, 8 experts of 16 of which 2, 96 words."""
    write_config(tmp_path, TINY)
    _, shape = family_of(read_config(tmp_path / "model"))
    products = 32 * 16 * 4 + 2 * 32 * 16 * 2 + 16 * 4 * 32 + 32 * 8 + 2 * 3 * 32 * 16
    # a causal sequence of 10 tokens has 55 scores a head, of 16 products, and as many for values
    assert layer_flops(shape, [10, 6]) == 2 * 16 * products + 4 * 4 * 16 * (55 + 21)
    assert head_flops(shape, 5) == 2 * 5 * 32 * 96
