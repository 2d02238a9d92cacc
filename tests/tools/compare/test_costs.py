"""Cost of a step and of routing replay, computed by hand."""

import json
import math
from pathlib import Path

import pytest

from megatron_gspo.tools.compare.costs import PUBLISHED, PublishedModel, cost_of, estimated_storage, model_of
from megatron_gspo.tools.compare.run_records import Run


def test_cost_of_a_step_by_hand():
    records = [{"step": 1, "time/step": 99.0, "time/train": 99.0}]
    records += [
        {"step": 2, "time/step": 2.0, "time/train": 1.0, "time/forward": 0.3, "time/backward": 0.5,
         "time/generate": 0.4, "routing/replay_bytes": 640, "perf/tokens": 40, "perf/peak_memory_gib": 1.0},
        {"step": 3, "time/step": 3.0, "time/train": 1.0, "time/forward": 0.3, "time/backward": 0.5,
         "time/generate": 0.6, "time/evaluate": 1.0, "routing/replay_bytes": 320, "perf/tokens": 20,
         "perf/peak_memory_gib": 1.5},
    ]  # fmt: skip
    cost = cost_of("grpo", [Run("base", "grpo", 1, Path(), "finished", records=records)])
    assert cost.seconds == pytest.approx(
        {"time/generate": 0.5, "time/forward": 0.3, "time/backward": 0.5, "time/train": 0.2, "other": 0.5}
    )
    assert cost.step.mean == pytest.approx(2.0)  # (2 + 3 - 1) / 2: the first step and the evaluation are left out
    assert cost.replay_bytes_per_token == 16.0
    assert cost.memory_gib == 1.5


def test_storage_of_routes_by_hand():
    small, large = estimated_storage(PUBLISHED)
    assert (small.bytes_per_token, large.bytes_per_token) == (48 * 8, 94 * 8)
    assert small.tokens == 512 * 16_384 == 2**23
    assert small.batch_bytes == 3 * 2**30  # 384 = 3 * 2^7
    assert PublishedModel("wide", 2, 257, 8).bytes_per_token == 32  # beyond 256 experts an id takes two bytes
    assert math.isclose(small.log_prob_bytes / 2**20, 32)


def test_the_models_own_routes_come_from_its_config(tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    every = {"model_type": "qwen3_moe", "vocab_size": 9, "num_experts_per_tok": 4, **sizes}
    layers = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    (tmp_path / "config.json").write_text(json.dumps({**every, "num_experts": 16, **layers}))
    found = model_of({"model": {"path": str(tmp_path)}})
    assert (found.layers, found.bytes_per_token) == (2, 8)  # layers 1, 3, 5 have experts, 3 is made dense
    assert model_of({"model": {"path": "nowhere"}}) is None
    (tmp_path / "config.json").write_text(json.dumps({**every, "num_local_experts": 300, "num_hidden_layers": 4}))
    assert model_of({"model": {"path": str(tmp_path)}}).bytes_per_token == 32
