"""Coarse memory and time: worked by hand with round rates, and beside a rehearsal's figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gspo.config import Config, ParallelConfig, load_config
from megatron_gspo.gpus import GIB, Gpu, find_gpu
from megatron_gspo.tools.plan.__main__ import parser, write_config
from megatron_gspo.tools.plan.estimate import HALF_ROWS, LABEL_BYTES, Choice, Estimator, Hardware
from megatron_gspo.tools.plan.layouts import name_of
from tests.support.configs import parallel
from tests.support.model_shapes import SMALL, dense_shape, shape_of

# 100 TFLOP/s, memory 1 TB/s, NVLink 100 GB/s, network 10 GB/s
ROUND = Gpu("round", 100 * GIB, 1e14, 1e12, 1e11, 1e10)


def config_of(
    folder: Path, *overrides: str, batch: int = 8, prompt: int = 4, response: int = 4
) -> Config:
    options = [
        "--model",
        str(SMALL),
        "--global-batch-size",
        str(batch),
        "--prompt-length",
        str(prompt),
    ]
    args = parser().parse_args([*options, "--response-length", str(response)])
    return load_config(write_config(args, folder), list(overrides))


def dense(folder: Path, *overrides: str, gpus: int = 2) -> Estimator:
    """2 layers of 360 parameters, 10 words of 8 numbers; everything reached."""
    return Estimator(dense_shape(), config_of(folder, *overrides), Hardware(ROUND, gpus, 1.0, 1.0))


def test_states_by_hand(tmp_path: Path) -> None:
    """Of 2 x 360 + 2 x 80 parameters and two data-parallel ranks: 2 bytes of weights, 4 of
    gradients, half of 12.
    """
    parameters = 2 * 360 + 2 * 80
    states = dense(tmp_path).states(ParallelConfig())
    assert states == (2 * parameters, 4 * parameters, 6 * parameters)
    tensor = dense(tmp_path).states(ParallelConfig(tensor_model_parallel_size=2))
    assert tensor == (parameters, 2 * parameters, 6 * parameters)
    stage = 360 + 80
    piped = dense(tmp_path).states(ParallelConfig(pipeline_model_parallel_size=2))
    assert piped == (2 * stage, 4 * stage, 12 * stage)
    whole = dense(tmp_path, "model.dtype=float32", "parallel.use_distributed_optimizer=false")
    assert whole.states(whole.config.parallel) == (4 * parameters, 4 * parameters, 8 * parameters)


def test_adapters_a_reference_and_a_value_model(tmp_path: Path) -> None:
    parameters = 2 * 360 + 2 * 80
    assert dense(tmp_path, "lora.rank=2").states(ParallelConfig()) == (2 * parameters, 0, 0)
    reference = dense(tmp_path, "algorithm.kl_loss_coef=0.1").states(ParallelConfig())
    assert reference == (4 * parameters, 4 * parameters, 6 * parameters)
    ppo = dense(tmp_path, "algorithm.name=ppo").states(ParallelConfig())
    assert ppo == (4 * parameters, 8 * parameters, 12 * parameters)


def test_time_by_hand(tmp_path: Path) -> None:
    """8 sequences of 4 + 4 tokens: matrices of 336 numbers in each of 2 layers, 36 pairs in each of
    2 heads of 4, and 4 positions of 80 weights; old log-probs, forward, and twice that backward.
    """
    estimator = dense(tmp_path, gpus=1)
    estimate = estimator.estimate(Choice(ParallelConfig(), "none", 16))
    flops = 8 * 2 * (8 * 2 * 336 + 2 * 2 * (4 + 4) * 36 + 4 * 80) * 4
    assert estimate.compute == pytest.approx(flops / 1e14)
    assert estimate.micro_batches == 4 and estimate.communication == estimate.bubble == 0
    again = estimator.estimate(Choice(ParallelConfig(), "full", 16))
    assert again.compute == pytest.approx(flops / 1e14 * 5 / 4)


def test_communication_by_hand(tmp_path: Path) -> None:
    """TP 2 gathers and scatters twice a layer, in three passes, and the head's 4 numbers of each of
    32 response tokens in two; gradients in float32 and weights go to the other replica. 16 GPUs
    have two nodes, so that the replicas' ring takes the network."""
    tensor = ParallelConfig(tensor_model_parallel_size=2)
    near = dense(tmp_path, gpus=2).estimate(Choice(tensor, "none", 16)).communication
    assert near == pytest.approx((3 * 2 * 4 * 2 * 64 * 8 / 2 + 2 * 4 * 4 * 32) / 1e11)
    data = dense(tmp_path, gpus=2).estimate(Choice(ParallelConfig(), "none", 16)).communication
    assert data == pytest.approx((4 + 2) * (2 * 360 + 160) / 2 / 1e11)
    far = dense(tmp_path, gpus=16).communication_seconds(Choice(ParallelConfig(), "none", 16), 0)
    assert far == pytest.approx((4 + 2) * (2 * 360 + 160) * 15 / 16 / 1e10)


def test_further_ids_by_hand(tmp_path: Path) -> None:
    """5 ids that could be drawn have log-probs in both passes, and the rollout engine's 5 most likely
    ones in the update's alone."""
    tensor = ParallelConfig(tensor_model_parallel_size=2)
    choice = Choice(tensor, "none", 16)
    plain = dense(tmp_path).estimate(choice)
    for overrides, passes in (
        (("rollout.top_k=5", "rollout.max_support=5"), 2),
        (("algorithm.score_centering=5",), 1),
    ):
        further = dense(tmp_path, *overrides).estimate(choice)
        added = further.communication - plain.communication
        assert added == pytest.approx(passes * 5 * 4 * 32 / 1e11)
    few, many = (
        dense(tmp_path, f"algorithm.score_centering={count}").activation_bytes(choice, 16, 4)
        for count in (1000, 3000)
    )
    assert many - few == pytest.approx(LABEL_BYTES * 8 * 2000)


def test_a_pipeline_waits(tmp_path: Path) -> None:
    """One of two stages waits for one micro-batch of 8; in chunks for half of one."""
    estimator = dense(tmp_path)
    plain = estimator.estimate(Choice(ParallelConfig(pipeline_model_parallel_size=2), "none", 8))
    assert plain.micro_batches == 8
    assert plain.bubble == pytest.approx((plain.compute + plain.communication) / 8)
    chunks = ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    interleaved = estimator.estimate(Choice(chunks, "none", 8))
    assert interleaved.bubble == pytest.approx(
        (interleaved.compute + interleaved.communication) / 16
    )


def test_experts_with_few_tokens_are_slow(tmp_path: Path) -> None:
    """With as many rows of an expert as half of its speed needs, its products take twice as
    long.
    """
    hardware = Hardware(ROUND, 8, 1.0, 1.0)
    config = config_of(tmp_path)
    estimator = Estimator(shape_of(SMALL), config, hardware)
    choice = Choice(ParallelConfig(), "none", 8)
    most, least = (
        estimator.compute_seconds(choice, tokens) for tokens in (10**12, HALF_ROWS * 128 // 8)
    )
    experts = 2 * 48 * 8 * 3 * 768 * 2048
    assert (least - most) * 8 * 1e14 == pytest.approx(8 * 8 * 4 * experts, rel=1e-6)


@pytest.mark.parametrize(
    ("layout", "gpus", "recompute", "tokens", "rehearsed"),
    [
        (parallel(tensor=2, expert=8), 16, "full", 36_864, (8.2, 16.4, 21.3, 7.7)),
        (parallel(context=2, expert=8), 32, "none", 9_216, (9.6, 19.2, 10.7, 24.3)),
        (
            parallel(pipeline=2, virtual_pipeline=2, context=2, expert=8),
            32,
            "none",
            9_216,
            (4.8, 9.6, 10.7, 30.3),
        ),
        (
            parallel(pipeline=8, virtual_pipeline=3, context=2, expert=4),
            32,
            "none",
            9_216,
            (2.5, 5.0, 11.3, 32.1),
        ),
    ],
    ids=lambda value: name_of(value) if isinstance(value, ParallelConfig) else "",
)
def test_memory_beside_a_rehearsal(
    layout: ParallelConfig,
    gpus: int,
    recompute: str,
    tokens: int,
    rehearsed: tuple[float, ...],
    tmp_path: Path,
) -> None:
    """GiB of Qwen3-30B-A3B as megatron-gspo plan rehearsed them: states, and the peak of
    activations.
    """
    config = config_of(tmp_path, batch=256, prompt=1024, response=8192)
    estimator = Estimator(shape_of(SMALL), config, Hardware(find_gpu("h100"), gpus, 1.0, 1.0))
    estimate = estimator.estimate(Choice(layout, recompute, tokens))
    states = (estimate.weights, estimate.gradients, estimate.optimizer)
    assert [size / GIB for size in states] == pytest.approx(rehearsed[:3], rel=0.02, abs=0.05)
    assert 1 < estimate.activations / GIB / rehearsed[3] < 1.2
