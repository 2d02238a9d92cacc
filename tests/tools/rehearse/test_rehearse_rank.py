"""Whole rehearsals of a tiny model."""

import dataclasses
import functools
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from megatron_gspo.tools.rehearse.records import RankRecord

from .on_fake_gpu import on_fake_gpu

MODEL = dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=128, moe_intermediate_size=32,
    num_experts=8, num_experts_per_tok=2, vocab_size=128, max_position_embeddings=512, rms_norm_eps=1e-6,
    rope_theta=10000.0, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False,
    hidden_act="silu", attention_bias=False,
)  # fmt: skip


PPO = ("algorithm.name=ppo", "algorithm.epsilon_low=0.2", "algorithm.epsilon_high=0.2")


def config(
    dtype: str = "bfloat16", num_key_value_heads: int = 2, overrides: tuple[str, ...] = (), **parallel: Any
) -> Any:
    """The example's config with this layout, dtype, heads and overrides."""
    from megatron_gspo.config import load_config

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODEL | {"num_key_value_heads": num_key_value_heads}))
    example = Path(__file__).parents[3] / "examples" / "qwen3_moe" / "tiny_gspo.yaml"
    loaded = load_config(str(example), [f"model.path={folder}", f"model.dtype={dtype}", *overrides])
    plain = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 1}
    return dataclasses.replace(loaded, parallel=dataclasses.replace(loaded.parallel, **plain | parallel))


@functools.lru_cache
def rehearsed(rank: int, world: int, imbalance: float = 1.0, **parallel: Any) -> RankRecord:
    from megatron_gspo.tools.rehearse.fake_device.cuda_api import fake_cuda
    from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu
    from megatron_gspo.tools.rehearse.rehearse_rank import rehearse_rank

    layout = config(**parallel)
    gpu = FakeGpu(expert_parallel=layout.parallel.expert_model_parallel_size, imbalance=imbalance)
    with fake_cuda(gpu.host):
        return rehearse_rank(layout, rank, world, gpu)


def agreement(record: RankRecord, group: str) -> list[tuple[Any, ...]]:
    """Calls in order; a gather has other sizes on the rank that receives."""
    return [(c.op, c.dtype, c.op != "gather" and c.bytes) for c in record.collectives
            if c.group == group and c.dtype != "object"]  # fmt: skip


@on_fake_gpu
def test_a_value_model_is_rehearsed_too() -> None:
    """Of the policy's sizes: as many weights but for the output layer, and no host synchronisation of ours."""
    plain = rehearsed(1, 2, tensor_model_parallel_size=2, expert_model_parallel_size=2)
    found = rehearsed(1, 2, overrides=PPO, tensor_model_parallel_size=2, expert_model_parallel_size=2)
    assert {"values", "critic"} <= set(found.phases) and not {"values", "critic"} & set(plain.phases)
    output = 2 * 64 * (128 // 2 - 1)  # bfloat16 rows of the output layer, less the value head
    extra = found.memory.states["weights"] - plain.memory.states["weights"]
    assert 0 <= plain.memory.states["weights"] - output - extra < 1024  # DDP pads its buffers
    assert found.memory.states["optimizer"] > 1.8 * plain.memory.states["optimizer"]
    assert found.checkpoint.bytes > 1.8 * plain.checkpoint.bytes
    assert not [f for f in found.findings if f.kind != "made_up_value"]
    syncs = [(s.phase, s.kind) for s in found.host_syncs if s.phase in ("values", "critic")]
    assert syncs == [("values", "copy to host"), ("critic", "item"), ("critic", "copy to host")]  # norm and metrics


@on_fake_gpu
def test_every_phase_runs_on_two_tensor_parallel_ranks_alike() -> None:
    first = rehearsed(0, 4, tensor_model_parallel_size=2, expert_model_parallel_size=2)
    second = rehearsed(1, 4, tensor_model_parallel_size=2, expert_model_parallel_size=2)
    assert set(first.phases) >= {
        "build", "old_log_probs", "forward_backward", "optimizer", "weight_export", "checkpoint_plan"
    }  # fmt: skip
    assert (first.coordinates["tp"], second.coordinates["tp"]) == (0, 1)
    for group in ("tp", "ep", "expert_tp_ep", "dp_cp", "world"):
        assert agreement(first, group) == agreement(second, group), group
    assert agreement(first, "tp") and agreement(first, "ep")
    assert len(first.micro_batches) == 2
    assert not [finding for finding in first.findings if finding.is_defect]


@on_fake_gpu
def test_states_are_those_of_the_parameters() -> None:
    """bfloat16 weights, float32 gradients, and 12 bytes of the optimizer shared by two data-parallel ranks."""
    from megatron_gspo.mcore.meta_device import meta_model
    from megatron_gspo.mcore.process_groups import current_groups, initialize, shutdown
    from megatron_gspo.models import family_of, read_config
    from megatron_gspo.tools.rehearse.collective_log import CollectiveLog
    from megatron_gspo.tools.rehearse.fake_world import fake_world
    from megatron_gspo.tools.rehearse.host_log import HostLog
    from megatron_gspo.tools.rehearse.known_values import KnownValues

    record = rehearsed(0, 4, tensor_model_parallel_size=2, expert_model_parallel_size=2)
    layout = config(tensor_model_parallel_size=2, expert_model_parallel_size=2)
    with fake_world(0, 4, CollectiveLog(HostLog(), KnownValues())):
        initialize(layout.parallel, seed=0)
        shape = family_of(read_config(layout.model.path))[1]
        chunks = meta_model(shape, layout.parallel, layout.model, current_groups())
        count = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
        shutdown(keep_distributed=True)
    padding = 1024  # buckets are padded to equal parts
    assert 0 <= record.memory.states["weights"] - 2 * count <= 2 * padding
    assert 0 <= record.memory.states["gradients"] - 4 * count <= 4 * padding
    assert abs(record.memory.states["optimizer"] - 6 * count) <= 8 * padding


@on_fake_gpu
def test_pipeline_stages_exchange_what_the_other_expects() -> None:
    first = rehearsed(0, 4, pipeline_model_parallel_size=2)
    last = rehearsed(2, 4, pipeline_model_parallel_size=2)
    assert len(first.micro_batches) == len(last.micro_batches) == 2
    assert agreement(first, "pp")[-3:] == agreement(last, "pp")[-3:]
    sends = Counter(c.op for c in first.collectives if c.peer == 2)
    others = Counter(c.op for c in last.collectives if c.peer == 0)
    assert sends["send"] == others["recv"] and sends["recv"] == others["send"]
    export = [[(c.op, c.bytes) for c in record.collectives if c.phase == "weight_export" and c.group == "pp"
               and c.dtype != "object"] for record in (first, last)]  # fmt: skip
    assert export[0] == export[1]
    assert len(export[0]) > 2


@on_fake_gpu
def test_the_first_expert_rank_gets_more_tokens_if_the_router_is_skewed() -> None:
    even = rehearsed(0, 4, expert_model_parallel_size=4)
    skewed = rehearsed(0, 4, 2.0, expert_model_parallel_size=4)

    def received(record: RankRecord) -> int:
        return sum(sum(c.received) for c in record.collectives if c.phase == "forward_backward")

    assert received(skewed) > 1.3 * received(even)
    assert skewed.memory.peak.total > even.memory.peak.total
