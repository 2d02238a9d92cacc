"""The rehearsed mini-batch."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_gspo.config import Config, load_config
from megatron_gspo.models import family_of, read_config
from megatron_gspo.routing_replay.routes import RouteShape
from megatron_gspo.tools.rehearse.mini_batch import plan_mini_batch, synthetic_batch, with_plan

EXAMPLES = Path(__file__).parents[3] / "examples" / "qwen3_moe"


def config(name: str = "qwen3_30b_a3b_4x8_gspo", *overrides: str) -> Config:
    path = f"model.path={EXAMPLES / 'models' / 'Qwen3-30B-A3B'}"
    return load_config(str(EXAMPLES / f"{name}.yaml"), [path, *overrides])


def parallel(loaded: Config, **changes: Any) -> Config:
    return dataclasses.replace(loaded, parallel=dataclasses.replace(loaded.parallel, **changes))


@pytest.mark.parametrize(("virtual", "expected"), [(None, 5), (2, 8)])
def test_pipelines_reach_their_steady_state(virtual: int | None, expected: int) -> None:
    changed = parallel(
        config(), pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=virtual
    )
    assert plan_mini_batch(changed, 64).micro_batches == expected


def test_a_mini_batch_of_one_micro_batch_is_run_twice() -> None:
    small = config("qwen3_30b_a3b_4x8_gspo", "training.global_batch_size=16")
    plan = plan_mini_batch(small, 16)
    assert (plan.micro_batches, plan.of_all, plan.sequences, plan.samples) == (2, 1, 2, 32)
    assert with_plan(small, plan).training.micro_batch_size == 2


def test_samples_are_the_longest_of_the_config_and_valid() -> None:
    loaded = config()
    shape = family_of(read_config(loaded.model.path))[1]
    count = plan_mini_batch(loaded, 16).samples
    replica = np.arange(count) % 16
    dp = SimpleNamespace(rank=lambda: 3)
    batch = synthetic_batch(loaded, replica, dp, shape.vocab_size, RouteShape.of_model(shape))
    assert (len(batch), len(batch.responses), len(batch.inputs)) == (64, 4, 4)
    assert set(batch.lengths.tolist()) == {1024 + 8192}
    assert set(batch.responses.lengths.tolist()) == {8192}
    assert batch.inputs["tokens"].shape == (4 * 9216,)
    assert batch.inputs.arrays["tokens"].shape == (9216,), "they share their arrays"


def test_ids_of_the_rollout_engine_are_made_up_where_the_loss_reads_them() -> None:
    centred = ("algorithm.score_centering=3",)
    truncated = ("rollout.engine=embedded", "rollout.top_k=5", "rollout.max_support=5")
    dp = SimpleNamespace(rank=lambda: 0)
    given = config("qwen3_30b_a3b_4x8_gspo", *centred)
    batch = synthetic_batch(given, np.zeros(2), dp, 151_936, None).select([1])
    assert batch.responses["rollout_top_ids"].shape == (8192, 3)
    assert batch.responses["rollout_top_log_probs"].shape == (8192, 3)
    assert batch.responses["centering_advantages"].shape == (8192,)
    given = config("qwen3_30b_a3b_4x8_gspo", "sglang={}", *truncated)
    batch = synthetic_batch(given, np.zeros(2), dp, 151_936, None).select([1])
    assert set(batch.responses["support_lengths"].tolist()) == {5}
    ids = batch.supports["ids"].reshape(8192, 5)
    assert np.array_equal(ids[:, 0], batch.response_tokens)


def test_a_teachers_ids_are_made_up_where_the_loss_reads_them() -> None:
    dp = SimpleNamespace(rank=lambda: 0)
    given = config(
        "qwen3_30b_a3b_4x8_gspo",
        "algorithm.name=gspo_token",
        "distillation.teacher=examples/qwen3_moe/models/Qwen3-30B-A3B",
        "distillation.top_k=3",
    )
    batch = synthetic_batch(given, np.zeros(2), dp, 151_936, None).select([1])
    assert batch.responses["teacher_top_ids"].shape == (8192, 3)
    assert batch.responses["teacher_top_log_probs"].shape == (8192, 3)
