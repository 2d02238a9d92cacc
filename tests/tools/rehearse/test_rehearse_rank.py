"""Whole rehearsals of a tiny model."""

import dataclasses
import functools
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_gspo.tools.rehearse.records import HostSync, RankRecord

from .on_fake_gpu import on_fake_gpu

MODEL = dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_experts=8,
    num_experts_per_tok=2,
    vocab_size=128,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    tie_word_embeddings=False,
    hidden_act="silu",
    attention_bias=False,
)


PPO = ("algorithm.name=ppo", "algorithm.epsilon_low=0.2", "algorithm.epsilon_high=0.2")


def config(
    dtype: str = "bfloat16",
    num_key_value_heads: int = 2,
    overrides: tuple[str, ...] = (),
    **parallel: Any,
) -> Any:
    """The example's config with this layout, dtype, heads and overrides."""
    from megatron_gspo.config import load_config

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(
        json.dumps(MODEL | {"num_key_value_heads": num_key_value_heads})
    )
    example = Path(__file__).parents[3] / "examples" / "qwen3_moe" / "tiny_gspo.yaml"
    loaded = load_config(str(example), [f"model.path={folder}", f"model.dtype={dtype}", *overrides])
    plain = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 1}
    return dataclasses.replace(
        loaded, parallel=dataclasses.replace(loaded.parallel, **plain | parallel)
    )


@functools.lru_cache
def rehearsed(rank: int, world: int, imbalance: float = 1.0, **parallel: Any) -> RankRecord:
    return with_waits(rank, world, imbalance, **parallel)[0]


def with_waits(
    rank: int, world: int, imbalance: float = 1.0, **parallel: Any
) -> tuple[RankRecord, list[HostSync]]:
    """A rehearsal, and where the host waits between the first and the last operation of a
    pass's micro-batches.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from megatron_gspo.mcore import train_step
    from megatron_gspo.tools.rehearse.fake_device.cuda_api import fake_cuda
    from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu
    from megatron_gspo.tools.rehearse.rehearse_rank import rehearse_rank

    layout = config(**parallel)
    gpu = FakeGpu(expert_parallel=layout.parallel.expert_model_parallel_size, imbalance=imbalance)
    waits: list[HostSync] = []
    original = train_step.run_schedule

    def run_schedule(*args: Any, **kwargs: Any) -> list[Any]:
        before = gpu.host.syncs
        outputs = original(*args, **kwargs)
        waits.extend(sync for sync in gpu.host.syncs if sync not in before)
        return outputs

    # a stream of the class would record its waits in the log of the process's first rehearsal
    stream = mock.patch.object(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", None)
    with fake_cuda(gpu.host), stream, mock.patch.object(train_step, "run_schedule", run_schedule):
        return rehearse_rank(layout, rank, world, gpu), waits


def agreement(record: RankRecord, group: str) -> list[tuple[Any, ...]]:
    """Calls in order; a gather has other sizes on the rank that receives."""
    return [
        (c.op, c.dtype, c.op != "gather" and c.bytes)
        for c in record.collectives
        if c.group == group and c.dtype != "object"
    ]


@on_fake_gpu
def test_a_value_model_is_rehearsed_too() -> None:
    """Of the policy's sizes: as many weights but for the output layer, and our code waits at
    the end of a pass only.
    """
    plain = rehearsed(1, 2, tensor_model_parallel_size=2, expert_model_parallel_size=2)
    with_critic = rehearsed(
        1, 2, overrides=PPO, tensor_model_parallel_size=2, expert_model_parallel_size=2
    )
    assert {"values", "critic"} <= set(with_critic.phases) and not {"values", "critic"} & set(
        plain.phases
    )
    output = 2 * 64 * (128 // 2 - 1)  # bfloat16 rows of the output layer, less the value head
    extra = with_critic.memory.states["weights"] - plain.memory.states["weights"]
    assert 0 <= plain.memory.states["weights"] - output - extra < 1024  # DDP pads its buffers
    assert with_critic.memory.states["optimizer"] > 1.8 * plain.memory.states["optimizer"]
    assert with_critic.checkpoint.bytes > 1.8 * plain.checkpoint.bytes
    assert not [f for f in with_critic.findings if f.kind != "made_up_value"]
    syncs = [
        (s.phase, s.kind)
        for s in with_critic.host_syncs
        if s.phase in ("values", "critic") and s.where[0].startswith("megatron_gspo/")
    ]
    assert syncs == [("values", "copy to host"), ("critic", "copy to host")]  # results and metrics


@on_fake_gpu
def test_every_phase_runs_on_two_tensor_parallel_ranks_alike() -> None:
    first = rehearsed(0, 4, tensor_model_parallel_size=2, expert_model_parallel_size=2)
    second = rehearsed(1, 4, tensor_model_parallel_size=2, expert_model_parallel_size=2)
    assert set(first.phases) >= {
        "build",
        "old_log_probs",
        "forward_backward",
        "optimizer",
        "weight_export",
        "checkpoint_plan",
    }
    assert (first.coordinates["tp"], second.coordinates["tp"]) == (0, 1)
    for group in ("tp", "ep", "expert_tp_ep", "dp_cp", "world"):
        assert agreement(first, group) == agreement(second, group), group
    assert agreement(first, "tp") and agreement(first, "ep")
    assert len(first.micro_batches) == 2
    assert not [finding for finding in first.findings if finding.is_defect]


@on_fake_gpu
def test_states_are_those_of_the_parameters() -> None:
    """bfloat16 weights, float32 gradients, and 12 bytes of the optimizer shared by two
    data-parallel ranks.
    """
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
    sends = Counter(c.op for c in first.collectives if c.peer == 2)
    others = Counter(c.op for c in last.collectives if c.peer == 0)
    assert sends["send"] == others["recv"] and sends["recv"] == others["send"]


@on_fake_gpu
def test_the_first_expert_rank_gets_more_tokens_if_the_router_is_skewed() -> None:
    even = rehearsed(0, 4, expert_model_parallel_size=4)
    skewed = rehearsed(0, 4, 2.0, expert_model_parallel_size=4)

    def received(record: RankRecord) -> int:
        return sum(sum(c.received) for c in record.collectives if c.phase == "forward_backward")

    assert received(skewed) > 1.3 * received(even)
    assert skewed.memory.peak.total > even.memory.peak.total


# Options of a step, several in each layout: rank, world, layout.
OPTIONS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one GPU": (0, 1, {}),
    "R3, reference": (
        0,
        2,
        dict(
            expert_model_parallel_size=2,
            overrides=("routing.replay=r3", "algorithm.kl_loss_coef=0.001"),
        ),
    ),
    "selective, overlap": (
        2,
        4,
        dict(
            pipeline_model_parallel_size=2,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            overrides=("model.recompute_granularity=selective",),
        ),
    ),
    "full, R2": (
        1,
        2,
        dict(
            context_parallel_size=2,
            overrides=("model.recompute_granularity=full", "routing.replay=r2"),
        ),
    ),
}


@functools.lru_cache
def with_options(name: str) -> tuple[RankRecord, list[HostSync]]:
    rank, world, layout = OPTIONS[name]
    return with_waits(rank, world, **layout)


def flops(record: RankRecord, *ops: str, left_out: int = 0) -> float:
    """Of forward_backward, by those of a forward pass; the log-prob pass has one. left_out: FLOPs
    of forward_backward that do not count."""
    training, scoring = (
        sum(record.flops[phase].get(op, 0) for op in ops)
        for phase in ("forward_backward", "old_log_probs")
    )
    return (training - left_out) / scoring


def copied_routes(record: RankRecord) -> dict[str, float]:
    """Bytes of routes for each token that go to the device, by phase: an int32 row number, and the
    ids of 2 experts in 2 layers where they are replayed. None of the copies blocks."""
    copies = [
        copy
        for copy in record.host_copies
        if any(site.endswith(" begin_chunk") for site in copy.where)
    ]
    assert not any(copy.blocking for copy in copies), copies
    tokens = sum(record.micro_batches) / len(record.groups["cp"])
    sizes: Counter[str] = Counter()
    for copy in copies:
        sizes[copy.phase] += copy.bytes
    return {phase: size / tokens for phase, size in sizes.items()}


@on_fake_gpu
def test_our_code_does_not_wait_within_the_micro_batches() -> None:
    for name in OPTIONS:
        record, waits = with_options(name)
        assert not [f for f in record.findings if f.is_defect], name
        assert not [sync for sync in waits if sync.where[0].startswith("megatron_gspo/")], name
    # expert counts and a stage's receives are read by Megatron, which is seen
    for name, file in (
        ("R3, reference", "moe/token_dispatcher.py"),
        ("selective, overlap", "p2p_communication.py"),
    ):
        phases = {sync.phase for sync in with_options(name)[1] if file in sync.where[0]}
        assert phases == {"old_log_probs", "forward_backward"}, (name, with_options(name)[1])


@on_fake_gpu
def test_one_gpu_alone() -> None:
    record = with_options("one GPU")[0]
    assert set(record.phases) >= {
        "old_log_probs",
        "forward_backward",
        "optimizer",
        "checkpoint_plan",
    }
    assert {len(collective.ranks) for collective in record.collectives} <= {1}
    assert flops(record, "aten::_grouped_mm") == 3


@on_fake_gpu
def test_routes_of_the_rollout_and_a_reference_policy() -> None:
    record = with_options("R3, reference")[0]
    policy, reference = (record.memory.states[name] for name in ("weights", "reference"))
    assert 0 <= policy - reference < 1024  # DDP pads its buffers
    # The gradient of a router's logits is three bfloat16 numbers, each a factor of two products.
    routed = sum(record.micro_batches) * MODEL["num_hidden_layers"]
    terms = 2 * 2 * (3 - 1) * routed * MODEL["hidden_size"] * MODEL["num_experts"]
    # The reference policy has a log-prob pass too.
    assert flops(record, "aten::mm", "aten::addmm", left_out=terms) == 3 / 2
    assert copied_routes(record) == {"old_log_probs": 8.0, "forward_backward": 8.0}


@on_fake_gpu
def test_recomputed_attention_and_weights_that_are_gathered_late() -> None:
    record = with_options("selective, overlap")[0]
    assert (
        flops(record, "torch_attn::_varlen_attn") == 2 and flops(record, "aten::_grouped_mm") == 3
    )
    gathers = {
        collective.phase
        for collective in record.collectives
        if collective.group == "dp_cp" and collective.op.startswith("allgather")
    }
    assert "old_log_probs" in gathers and "optimizer" not in gathers
    assert "optimizer" in {
        collective.phase
        for collective in rehearsed(0, 4, expert_model_parallel_size=4).collectives
        if collective.op.startswith("allgather")
    }


@on_fake_gpu
def test_recomputed_layers_replay_recorded_routes() -> None:
    record = with_options("full, R2")[0]
    assert (
        flops(record, "torch_attn::_varlen_attn") == 2 and flops(record, "aten::_grouped_mm") == 4
    )
    # Recorded, with whether a row is padding and its balanced route of 2 ids; then replayed.
    assert copied_routes(record) == {"old_log_probs": 7.0, "forward_backward": 8.0}


CENTRED = ("algorithm.score_centering=8",)
TRUNCATED = ("rollout.top_k=8", "rollout.max_support=8")


@on_fake_gpu
def test_further_ids_are_numbers_of_the_same_collectives() -> None:
    """The rollout engine's most likely ids have log-probs in updates, and those that could be drawn
    in every pass: a float32 of each at each response token, from two ranks."""
    layout = dict(tensor_model_parallel_size=2, expert_model_parallel_size=2)
    plain = rehearsed(0, 2, **layout)
    scored = sum(plain.micro_batches) * 10 // (16 + 10)  # prompts and responses of the example
    for overrides, passes in (
        (CENTRED, {"forward_backward"}),
        (TRUNCATED, {"old_log_probs", "forward_backward"}),
    ):
        record = rehearsed(0, 2, overrides=overrides, **layout)
        assert [(c.phase, c.op, c.group) for c in record.collectives] == [
            (c.phase, c.op, c.group) for c in plain.collectives
        ]
        added: Counter[str] = Counter()
        for call, other in zip(record.collectives, plain.collectives, strict=True):
            added[call.phase] += call.bytes - other.bytes
        assert {phase: size for phase, size in added.items() if size} == dict.fromkeys(
            passes, 2 * 8 * 4 * scored
        )
        assert not [finding for finding in record.findings if finding.is_defect]
