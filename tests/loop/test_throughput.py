"""What a step computed, and how fast it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_gspo.config import Config
from megatron_gspo.data.micro_batch_plan import PackingRules
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.gpus import GPUS, gpu_of_device
from megatron_gspo.loop.sample_flops import sample_flops
from megatron_gspo.loop.step_plan import plan_step
from megatron_gspo.loop.throughput import StepWork, step_work, throughput
from megatron_gspo.models.flops import forward_flops
from tests.loop.episodes import episode
from tests.support.model_shapes import dense_shape
from tests.support.samples import make_sample
from tests.support.training_runs import base_config

SHAPE = dense_shape()


def config(**sections: Any) -> Config:
    training = {"steps": 1, "global_batch_size": 2, "max_tokens_per_micro_batch": 64}
    rollout = {"rollout_batch_size": 1, "n_samples_per_prompt": 4, "max_response_length": 6}
    given = {"training": training, "rollout": rollout, **sections}
    return Config.from_dict(base_config("model", Path("run"), **given))


def samples() -> list[Any]:
    """Responses of 3, 4, 5 and 6 tokens to prompts of 2; the last has no trained token."""
    lengths = (3, 4, 5, 6)
    made = [make_sample(2, length, sample_index=i) for i, length in enumerate(lengths)]
    made[3] = make_sample(2, 6, mask=[0] * 6, sample_index=3)
    return made


def work_of(settings: Config, *, updates_policy: bool = True) -> StepWork:
    batch = TrainingBatch.of(samples())
    plan = plan_step(batch, None, settings, PackingRules(replicas=1, max_tokens=64), step=0)
    flops = sample_flops(SampleBatch.of(samples()), SHAPE)
    return step_work(batch, flops, settings, plan, updates_policy=updates_policy)


def flops(length: int, scored: int, shape: Any = SHAPE) -> Any:
    return forward_flops(shape, np.array([length]), np.array([scored]))


def test_every_pass_of_a_step_counts() -> None:
    """The old policy scores all responses; the updates train on them, the one without a trained
    token too, since it shares its mini-batch with one that has.
    """
    work = work_of(config(algorithm={"name": "gspo"}))
    each = [flops(2 + n, n) for n in (3, 4, 5, 6)]
    assert work.tokens == 4 * 2 + 18 and work.generated == 18
    assert work.log_prob_flops == sum(f.total[0] for f in each)
    assert work.training_flops == 3 * work.log_prob_flops
    assert work.recomputed_flops == sum(f.recomputed("none")[0] for f in each)


def test_a_reference_epochs_and_rollout_log_probs() -> None:
    one = work_of(config(algorithm={"name": "gspo"}))
    with_reference = work_of(config(algorithm={"name": "gspo", "kl_loss_coef": 0.1}))
    assert with_reference.log_prob_flops == 2 * one.log_prob_flops
    training = {"ppo_epochs": 3}
    again = work_of(
        config(
            algorithm={"name": "gspo", "old_log_probs": "rollout"},
            training={"steps": 1, "global_batch_size": 2, **training},
        )
    )
    assert again.log_prob_flops == 0 and again.training_flops == 3 * one.training_flops


def test_text_of_an_environment_is_not_scored() -> None:
    conversation = episode(1.0, 2.0)
    batch = TrainingBatch.of([conversation])
    settings = config(training={"steps": 1, "global_batch_size": 1})
    plan = plan_step(batch, None, settings, PackingRules(replicas=1, max_tokens=64), step=0)
    flops = sample_flops(SampleBatch.of([conversation]), SHAPE)
    work = step_work(batch, flops, settings, plan, updates_policy=True)
    generated = int(batch.responses["generated"].sum())
    assert work.generated == generated < conversation.response_length


def test_speeds_by_hand() -> None:
    work = StepWork(
        tokens=300,
        generated=200,
        log_prob_flops=4e12,
        training_flops=12e12,
        recomputed_flops=3e12,
    )
    times = {"time/step": 10.0, "time/generate": 4.0, "time/log_probs": 1.0, "time/train": 2.0}
    metrics = {"perf/trained_tokens": 300.0}
    rates = throughput(work, times, metrics, peak=1e13, generation_gpus=4)
    memory = rates.pop("perf/peak_memory_gib")
    assert memory > 0
    assert rates == times | {
        "perf/tokens": 300.0,
        "perf/tokens_per_second": 30.0,
        "perf/train_tokens_per_second": 150.0,
        "perf/tflops_per_gpu": 6.0,
        "perf/mfu": 0.6,
        "perf/recomputed": 0.25,
        "perf/log_probs_tflops_per_gpu": 4.0,
        "perf/log_probs_mfu": 0.4,
        "perf/generated_tokens_per_second": 50.0,
        "perf/generated_tokens_per_second_per_gpu": 12.5,
    }


def test_servers_generate_while_the_trainer_trains() -> None:
    work = StepWork(300, 200, 0.0, 0.0, 0.0)
    times = {"time/step": 10.0, "time/generate": 1.0}
    busy = {"time/servers_busy": 8.0}
    rates = throughput(work, times, busy, peak=None, generation_gpus=None)
    assert rates["perf/generated_tokens_per_second"] == 25.0
    assert rates["perf/trainer_idle"] == 0.1
    assert rates["perf/servers_idle"] == pytest.approx(0.2)
    assert not {
        "perf/mfu",
        "perf/tflops_per_gpu",
        "perf/generated_tokens_per_second_per_gpu",
    } & set(rates)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_gpu_that_a_driver_names(driver: str, name: str | None) -> None:
    assert gpu_of_device(driver) == (None if name is None else GPUS[name])
