"""The clocks of a step: phases, and the parts of an update as Megatron's schedule times them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.timers import Timers, UpdateClock
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.train_step import compute_log_probs, train_mini_batch
from tests.support.configs import micro_batches_of, parallel
from tests.support.distributed import run_distributed
from tests.support.routing_cases import GRPO, policy_of, scored_samples
from tests.support.tiny_models import save_tiny_model

NAP = 0.03  # seconds
PARTS = {"time/forward", "time/backward", "time/optimizer"}


def test_phases_add_up_until_they_are_taken():
    timers = Timers()
    for phase in ("generate", "train", "generate"):
        with timers(phase):
            time.sleep(NAP)
    taken = timers.read_and_reset()
    assert taken.keys() == {"time/generate", "time/train", "time/step"}
    assert taken["time/generate"] >= 2 * NAP and taken["time/train"] >= NAP
    assert taken["time/step"] >= taken["time/generate"] + taken["time/train"]
    again = timers.read_and_reset()
    assert again.keys() == {"time/step"} and again["time/step"] < taken["time/step"]


def test_spans_are_since_the_step_began():
    timers = Timers()
    with timers("generate"):
        time.sleep(NAP)
    with pytest.raises(ValueError), timers("train"):
        raise ValueError
    (first, begin, end), (second, then, _) = timers.spans
    assert (first, second) == ("generate", "train")
    assert 0 <= begin and begin + NAP <= end <= then
    timers.read_and_reset()
    assert timers.spans == []


def test_a_clock_keeps_the_parts_of_an_update_and_nothing_else():
    clock = UpdateClock()
    assert clock.read_and_reset() == {}
    for name, level in (
        ("forward-backward", 1),
        ("forward-compute", 2),
        ("all-grads-sync", 1),
        ("forward-compute", 2),
    ):
        stopwatch = clock(name, log_level=level)
        stopwatch.start(barrier=False)
        time.sleep(NAP)
        clock(name).stop()
    taken = clock.read_and_reset()
    assert taken.keys() == {"time/forward"} and 2 * NAP <= taken["time/forward"]
    assert clock.read_and_reset() == {}


class Slow(torch.autograd.Function):
    """Takes two naps on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(2 * NAP)
        return grad


def slow_down(module: Any, args: Any, output: Any) -> Any:
    time.sleep(NAP)
    return Slow.apply(output)


def time_an_update(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """An update of one sequence a micro-batch, each slowed down by one nap forward and two
    backward.
    """
    policy = policy_of(path, parallel(pipeline=world_size))
    samples = scored_samples(3)
    batching = micro_batches_of(80, micro_batch_size=1)
    clock = policy.config.timers = UpdateClock()
    # The first is slower.
    train_mini_batch(policy, TrainingBatch.of(samples), GRPO, batching, temperature=1.0)
    clock.read_and_reset()
    layers = unwrap(policy.chunks[0]).decoder.layers
    hook = layers[-1].self_attention.core_attention.register_forward_hook(slow_down)
    begin = time.perf_counter()
    result = train_mini_batch(policy, TrainingBatch.of(samples), GRPO, batching, temperature=1.0)
    measured: dict[str, Any] = {
        "wall": time.perf_counter() - begin,
        "update": clock.read_and_reset(),
        "metrics": result.metrics,
    }
    compute_log_probs(policy, TrainingBatch.of(samples), batching, temperature=1.0)
    measured["scored"] = clock.read_and_reset()
    hook.remove()
    policy.config.timers = None
    train_mini_batch(policy, TrainingBatch.of(samples), GRPO, batching, temperature=1.0)
    measured["off"] = clock.read_and_reset()
    return measured


@pytest.mark.parametrize("stages", [1, 2])
def test_a_clock_in_megatrons_schedule(stages, tmp_path):
    path = save_tiny_model(tmp_path / "model", "dense", num_hidden_layers=2)
    for measured in run_distributed(time_an_update, stages, path):
        update = measured["update"]
        assert update.keys() == PARTS and min(update.values()) > 0
        assert 3 * NAP <= update["time/forward"] and 6 * NAP <= update["time/backward"]
        assert sum(update.values()) <= measured["wall"]
        assert measured["scored"].keys() == {"time/forward"}
        assert measured["scored"]["time/forward"] >= 3 * NAP
        assert measured["off"] == {}, "without a clock nothing is timed"
        assert not PARTS & measured["metrics"].keys()
