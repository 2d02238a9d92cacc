"""The formula of a model's floating-point operations against those that a rehearsed step runs."""

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_gspo.tools.rehearse.records import RankRecord

from .on_fake_gpu import on_fake_gpu

EXAMPLE = Path(__file__).parents[3] / "examples" / "qwen3_moe" / "tiny_gspo.yaml"
PROMPT = 40
RESPONSE = 60  # with the prompt a chunk of the delta rule and a part of one


def rehearse(family: str, rank: int, world: int, *overrides: str) -> tuple[RankRecord, Any, Any]:
    """A rehearsed step of a tiny model of the family, its shape and its config."""
    from megatron_gspo.config import load_config
    from megatron_gspo.models import family_of, read_config
    from megatron_gspo.tools.rehearse.fake_device.cuda_api import fake_cuda
    from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu
    from megatron_gspo.tools.rehearse.rehearse_rank import rehearse_rank
    from tests.support.tiny_models import tiny_config

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(tiny_config(family).to_dict()))
    config = load_config(
        EXAMPLE,
        [
            f"model.path={folder}",
            "model.dtype=bfloat16",
            "parallel.tensor_model_parallel_size=1",
            "parallel.expert_model_parallel_size=1",
            f"data.max_prompt_length={PROMPT}",
            f"rollout.max_response_length={RESPONSE}",
            "training.log_prob_memory_gib=1e-6",  # logits are computed again
            "training.micro_batch_size=1",
            "rollout.rollout_batch_size=2",
            "rollout.n_samples_per_prompt=2",
            "training.global_batch_size=4",
            *overrides,
        ],
    )
    gpu = FakeGpu(expert_parallel=config.parallel.expert_model_parallel_size)
    with fake_cuda(gpu.host):
        record = rehearse_rank(config, rank, world, gpu)
    return record, family_of(read_config(folder))[1], config


def head_padding(shape: Any, length: int) -> tuple[float, float]:
    """Forward and backward pass: what attention computes of the zeros that make the heads of
    queries, keys and values as wide as each other, a multiple of 8.
    """
    from megatron_gspo.models.flops import attended_pairs

    if shape.latent is None or shape.indexer is not None:
        return 0.0, 0.0
    key = shape.latent.plain_dim + shape.rotary.dim
    value = shape.latent.value_dim
    width = -(-max(key, value) // 8) * 8
    pairs = float(attended_pairs(np.array([length]), None)[0])
    products = 2 * shape.num_attention_heads * shape.num_layers * pairs
    forward = products * (2 * width - key - value)
    return forward, products * (3 * (width - key) + 2 * (width - value))


def masked_products(shape: Any, length: int) -> tuple[float, float]:
    """Forward and backward pass: what sparse attention computes on top of the pairs that it selects.

    All queries of a block have the keys up to its last one computed, those that are not selected
    under a mask; here a sequence is one block. Heads of keys and values are as wide as each other.
    The indexer scores as many keys of the queries that have more than it selects. The backward pass
    computes the attention again, and then the scores and four products.
    """
    from megatron_gspo.models.flops import attended_pairs

    if shape.indexer is None:
        return 0.0, 0.0
    topk = shape.indexer.topk
    key = shape.latent.plain_dim + shape.rotary.dim
    value = shape.latent.value_dim
    width = max(key, value)
    products = 2 * shape.num_attention_heads * shape.num_layers
    selected = float(attended_pairs(np.array([length]), topk)[0])
    forward = products * (2 * width * length**2 - (key + value) * selected)
    backward = products * (7 * width * length**2 - (3 * key + 2 * value) * selected)
    causal = (length * (length + 1) - topk * (topk + 1)) / 2
    scored = (length - topk) * length - causal
    per_pair = shape.indexer.heads * (shape.indexer.head_dim + 1)
    return forward + 2 * shape.num_layers * per_pair * scored, backward


def bias_sums(shape: Any, length: int) -> float:
    """The backward pass of the experts' biases, whose sums are products with some equal rows."""
    from megatron_gspo.mcore.expert_products import STRIDE

    if not shape.linear_bias:
        return 0.0
    rows = length * shape.experts_per_token * sum(shape.moe_layers)
    return 2 * STRIDE * rows * (2 * shape.moe_ffn_hidden_size + shape.hidden_size)


def router_terms(shape: Any, length: int) -> float:
    """The gradient of a router's logits is three bfloat16 numbers, each a factor of two products."""
    numbers = length * shape.hidden_size * shape.num_experts * sum(shape.moe_layers)
    return 2 * 2 * (3 - 1) * numbers


def counted(records: Sequence[RankRecord], phase: str) -> int:
    return sum(sum(record.flops[phase].values()) for record in records)


def assert_agrees(records: Sequence[RankRecord], shape: Any, config: Any) -> None:
    """The counts of all ranks of a replica."""
    from megatron_gspo.models.flops import forward_flops

    length = PROMPT + RESPONSE
    forward = forward_flops(shape, np.array([length]), np.array([RESPONSE]))
    samples = sum(records[0].micro_batches) / length
    padding, padding_backward = np.add(
        head_padding(shape, length), masked_products(shape, length)
    ).tolist()
    assert counted(records, "old_log_probs") == samples * (float(forward.total[0]) + padding)
    trained = float(forward.training()[0])
    recompute = config.model.recompute_granularity
    trained += float(forward.recomputed(recompute)[0])
    passes = 1 if recompute == "none" else 2
    trained += passes * padding + padding_backward
    trained += bias_sums(shape, length) + router_terms(shape, length)
    assert counted(records, "forward_backward") == samples * trained


@on_fake_gpu
def test_every_mixer_runs_the_operations_of_the_formula() -> None:
    """Attention, windows with sinks, latent attention, sparse attention, delta nets with a shared
    expert, Mamba-2; what is recomputed is told apart.
    """
    for family, recompute in (
        ("moe", "none"),
        ("gpt_oss", "selective"),
        ("deepseek", "full"),
        ("deepseek_v32", "full"),
        ("glm_dsa", "none"),
        ("next", "none"),
        ("next", "full"),
        ("nemotron", "none"),
    ):
        try:
            recomputed = f"model.recompute_granularity={recompute}"
            record, shape, config = rehearse(family, 0, 1, recomputed)
            assert_agrees([record], shape, config)
        except AssertionError as error:
            raise AssertionError(family, recompute) from error


@on_fake_gpu
def test_context_parallel_ranks_share_the_operations() -> None:
    records = []
    for rank in range(2):
        record, shape, config = rehearse("dense", rank, 2, "parallel.context_parallel_size=2")
        records.append(record)
    assert_agrees(records, shape, config)


@on_fake_gpu
def test_a_value_model_has_a_head_of_one_value() -> None:
    from megatron_gspo.models.flops import forward_flops

    ppo = ("algorithm.name=ppo", "algorithm.epsilon_low=0.2", "algorithm.epsilon_high=0.2")
    record, shape, _ = rehearse("dense", 0, 1, *ppo)
    length = PROMPT + RESPONSE
    value_shape = dataclasses.replace(shape, value_head=True)
    forward = forward_flops(value_shape, np.array([length]), np.array([RESPONSE]))
    samples = sum(record.micro_batches) / length
    assert counted([record], "values") == samples * float(forward.total[0])
