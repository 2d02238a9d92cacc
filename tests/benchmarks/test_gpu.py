"""The GPU benchmark: its rows at tiny sizes on a CPU, its operations by hand, its config, the
names of GPUs.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from dataclasses import replace

import pytest

from benchmarks import gpu
from benchmarks.gpu import (
    REAL,
    TINY,
    head_flops,
    layer_flops,
    main,
    make_samples,
    measure,
    write_config,
)
from megatron_gspo.config import load_config
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
    # a causal sequence of 10 tokens has 50 scores a head (half of the square), of 16 products, and
    # as many for values
    assert layer_flops(shape, [10, 6]) == 2 * 16 * products + 4 * 4 * 16 * (50 + 18)
    assert head_flops(shape, 5) == 2 * 5 * 32 * 96


def test_the_real_sizes_are_those_of_the_model(tmp_path):
    config = load_config(write_config(tmp_path, REAL))
    _, shape = family_of(read_config(config.model.path))
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size) == (1, 2048, 151_936)
    assert (shape.num_attention_heads, shape.num_query_groups, shape.head_dim) == (32, 4, 128)
    assert (shape.num_experts, shape.experts_per_token, shape.moe_ffn_hidden_size) == (128, 8, 768)
    assert config.model.init == "random" and config.model.dtype == "bfloat16"
    assert config.training.max_tokens_per_micro_batch == REAL.tokens == 16_384
    sizes = replace(TINY, prompt=3, response=5)
    [sample, _] = make_samples(sizes, 96, 2)
    assert (sample.prompt_length, sample.response_length, len(sample.advantages)) == (3, 5, 5)


def test_the_steps_config_is_written_to_be_rehearsed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--config", str(tmp_path)])
    main()
    assert capsys.readouterr().out.strip() == str(tmp_path / "config.yaml")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["num_hidden_layers"] == 1
