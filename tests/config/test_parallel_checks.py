"""Parallel sizes against each other, the number of processes and the model."""

from __future__ import annotations

import pytest

from megatron_gspo.config import ConfigError, ParallelConfig
from megatron_gspo.config.parallel_checks import check_divisibility
from tests.config.building import assert_refused, build, refused


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (["parallel.virtual_pipeline_model_parallel_size=2"], "parallel.virtual_pipeline", "null"),
        (["parallel.sequence_parallel=true"], "parallel.sequence_parallel = true:", "null"),
        (
            ["parallel.overlap_param_gather=true"],
            "parallel.overlap_param_gather = true:",
            "overlap_grad_reduce: true",
        ),
    ],
)
def test_contradictions_are_refused_at_load(
    plain: dict, overrides: list[str], key: str, fix: str
) -> None:
    assert_refused(plain, overrides, key, fix)


@pytest.mark.parametrize(
    "world_size, sizes, good",
    [
        # tp pp cp ep etp; dense needs tp*pp*cp | world, experts etp*ep*pp | world
        (8, (2, 2, 2, 4, 1), True),
        (8, (2, 1, 1, 8, 1), True),
        (8, (4, 2, 1, 2, 2), True),
        (4, (2, 2, 2, 1, 1), False),
        (6, (4, 1, 1, 1, 1), False),
        (8, (1, 2, 1, 8, 1), False),
        (8, (2, 1, 1, 4, 4), False),
    ],
)
def test_layout(plain: dict, world_size: int, sizes: tuple[int, ...], good: bool) -> None:
    names = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    overrides = [
        f"parallel.{name}_parallel_size={size}" for name, size in zip(names, sizes, strict=True)
    ]
    if good:
        build(plain, *overrides).check(world_size)
    else:
        assert f"does not divide {world_size} processes" in refused(
            plain, *overrides, world_size=world_size
        )


def divisible(hf: dict, **sizes: int | bool) -> str | None:
    try:
        check_divisibility(ParallelConfig(**sizes), hf)
    except ConfigError as error:
        return error.key
    return None


def test_model_must_divide(hf_config: dict) -> None:
    assert divisible(hf_config, tensor_model_parallel_size=4) is None
    # 4 kv heads.
    assert (
        divisible(hf_config, tensor_model_parallel_size=8) == "parallel.tensor_model_parallel_size"
    )
    assert (
        divisible(hf_config, pipeline_model_parallel_size=3)
        == "parallel.pipeline_model_parallel_size"
    )
    assert (
        divisible(hf_config, expert_model_parallel_size=3) == "parallel.expert_model_parallel_size"
    )
    assert (
        divisible(hf_config, expert_tensor_parallel_size=3)
        == "parallel.expert_tensor_parallel_size"
    )
    virtual = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    assert divisible(hf_config, **virtual) is None
    assert (
        divisible({**hf_config, "num_hidden_layers": 6}, **virtual)
        == "parallel.virtual_pipeline_model_parallel_size"
    )
    no_sequence = {"tensor_model_parallel_size": 2, "sequence_parallel": False}
    assert divisible(hf_config, **no_sequence) == "parallel.sequence_parallel"


def test_layers_may_be_told_by_their_kinds_alone(hf_config: dict) -> None:
    del hf_config["num_hidden_layers"]
    hf_config["hybrid_override_pattern"] = "MEM*ME"
    assert divisible(hf_config, pipeline_model_parallel_size=3) is None
    key = "parallel.pipeline_model_parallel_size"
    assert divisible(hf_config, pipeline_model_parallel_size=4) == key


def test_dense_models(hf_config: dict) -> None:
    del hf_config["num_experts"]
    hf_config["intermediate_size"] = 100
    assert divisible(hf_config, tensor_model_parallel_size=4, sequence_parallel=False) is None
    hf_config["intermediate_size"] = 102
    assert (
        divisible(hf_config, tensor_model_parallel_size=4) == "parallel.tensor_model_parallel_size"
    )
    assert (
        divisible(hf_config, expert_model_parallel_size=2) == "parallel.expert_model_parallel_size"
    )
    assert (
        divisible(hf_config, expert_tensor_parallel_size=2)
        == "parallel.expert_tensor_parallel_size"
    )


@pytest.mark.parametrize("key", ["linear_num_key_heads", "n_groups"])
def test_heads_of_a_recurrence_are_cut_by_tensor_and_context_parallelism(
    hf_config: dict, key: str
) -> None:
    hf_config[key] = 2
    assert divisible(hf_config, tensor_model_parallel_size=2) is None
    assert divisible(hf_config, context_parallel_size=2) is None
    assert (
        divisible(hf_config, tensor_model_parallel_size=4) == "parallel.tensor_model_parallel_size"
    )
    both = {"tensor_model_parallel_size": 2, "context_parallel_size": 2}
    assert divisible(hf_config, **both) == "parallel.context_parallel_size"
