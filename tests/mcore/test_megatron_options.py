"""The `megatron` section under the installed version: what is passed through, and what is
refused with which words.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

from megatron_gspo.algorithms import preset
from megatron_gspo.config import ConfigError, RoutingConfig
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.errors import RunError
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.megatron_options import (
    CLASSES,
    construct,
    resolve_options,
    version,
)
from megatron_gspo.mcore.policy import (
    build_policy,
    check_megatron_options,
)
from megatron_gspo.mcore.train_step import train_mini_batch
from tests.equivalence.cases import make_samples
from tests.mcore.test_model import shape_of
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model


def refused(name: str, value: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve_options({name: value})
    assert caught.value.key == f"megatron.{name}" and "\n" not in str(caught.value)
    return caught.value


def test_an_option_goes_to_every_class_that_has_it():
    options = resolve_options(
        {
            "moe_permute_fusion": False,
            "bucket_size": 4096,
            "log_num_zeros_in_grad": True,
            "barrier_with_L1_time": False,
        }
    )
    assert options.transformer == {"moe_permute_fusion": False, "barrier_with_L1_time": False}
    assert options.optimizer == {"log_num_zeros_in_grad": True, "barrier_with_L1_time": False}
    assert options.ddp == {"bucket_size": 4096}


def test_an_unknown_option_names_the_classes_and_the_version():
    error = refused("moe_permute_fusoin", True)
    classes = "TransformerConfig, OptimizerConfig, DistributedDataParallelConfig"
    assert error.problem == f"is not an option of {classes} of megatron-core {version()}"
    assert error.fix == "did you mean moe_permute_fusion?"
    assert refused("qqq", 1).fix == "remove it"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("tensor_model_parallel_size", "parallel.tensor_model_parallel_size"),
        ("num_layers", "model.path"),
    ],
)
def test_an_option_that_another_key_sets_is_refused_with_that_key(name, key):
    error = refused(name, 2)
    assert error.problem == f"is set by {key}" and error.fix == f"remove it and set {key}"


@pytest.mark.parametrize(
    ("name", "value", "harmless", "reason"),
    [
        ("hidden_dropout", 0.1, 0.0, "log-probs of one policy random"),
        ("moe_expert_capacity_factor", 1.5, None, "drops tokens"),
        ("moe_aux_loss_coeff", 0.01, 0.0, "adds a term to the objective"),
        ("moe_router_load_balancing_type", "aux_loss", "none", "adds a term to the objective"),
        ("moe_router_dtype", None, "fp64", "flips routes"),
        ("fp8", "hybrid", None, "scales tensors by earlier batches"),
    ],
)
def test_an_option_that_breaks_an_assumption_is_refused_with_the_reason(
    name, value, harmless, reason
):
    error = refused(name, value)
    assert reason in error.problem and error.fix == "remove it"
    resolve_options({name: harmless})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("moe_permute_fusion", 1, "set true or false"),
        ("bucket_size", "4096", "set an integer or null"),
        ("init_method", "normal", "set nothing: it is a function"),
        ("exp_avg_dtype", "int8", "set one of float32, bfloat16, float16"),
        ("attention_backend", "quick", "set one of flash"),
    ],
)
def test_a_wrong_type_is_refused(name, value, expected):
    error = refused(name, value)
    assert error.problem == "has the wrong type" and error.fix.startswith(expected), error


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("moe_router_fusion", True, False),
        ("moe_layer_recompute", True, False),
        ("recompute_modules", ["core_attn", "moe"], ["core_attn"]),
    ],
)
def test_an_option_that_bypasses_router_hooks_is_refused_where_they_are_used(name, value, allowed):
    if name in {field.name for cls in CLASSES for field in dataclasses.fields(cls)}:
        error = refused(name, value)
        assert error.problem == "bypasses the router hooks of routing replay and routing metrics"
        assert error.fix == "remove it, or set routing.replay: none and routing.metrics: false"
        assert resolve_options({name: allowed}).transformer == {name: allowed}
        assert resolve_options({name: value}, uses_routes=False).transformer == {name: value}


@pytest.mark.parametrize("name", ["moe_permute_fusion", "moe_router_fusion"])
def test_kernels_of_transformer_engine_are_refused_where_it_cannot_be_used(name):
    sections = shape_of(), parallel(), model_config(), adam(1e-3), RoutingConfig(metrics=False)
    with pytest.raises(
        ConfigError, match=f"megatron.{name} = true: uses kernels of Transformer Engine.*; install"
    ):
        check_megatron_options({name: True}, *sections)
    assert check_megatron_options({name: False}, *sections).transformer == {name: False}
    assert resolve_options({name: True}, uses_routes=False, fused=True).transformer == {name: True}


@pytest.mark.parametrize(
    ("routing", "experts", "is_refused"),
    [
        (RoutingConfig(), True, True),
        (RoutingConfig(replay="r2", metrics=False), True, True),
        (RoutingConfig(metrics=False), True, False),
        (RoutingConfig(), False, False),
    ],
)
def test_router_hooks_are_used_by_replay_and_metrics_of_a_mixture_of_experts(
    routing, experts, is_refused
):
    given = {"recompute_modules": ["moe"]}
    shape = shape_of() if experts else shape_of("dense")
    sections = shape, parallel(), model_config(), adam(1e-3), routing
    if is_refused:
        with pytest.raises(ConfigError, match="bypasses the router hooks"):
            check_megatron_options(given, *sections)
    else:
        assert check_megatron_options(given, *sections).transformer == given


def test_names_of_dtypes_and_enum_members_are_looked_up():
    options = resolve_options(
        {"exp_avg_dtype": "bfloat16", "attention_backend": "flash", "init_method_std": 1}
    )
    assert options.optimizer == {"exp_avg_dtype": torch.bfloat16}
    assert options.transformer["attention_backend"].name == "flash"
    assert options.transformer["init_method_std"] == 1


def test_a_keyword_of_ours_that_megatron_lacks_is_an_error_and_not_dropped():
    with pytest.raises(
        RunError, match=f"OptimizerConfig of megatron-core {version()} has no option no_such"
    ):
        construct(OptimizerConfig, {"lr": 1.0, "no_such": 2}, {})


def test_what_megatron_itself_rejects_is_a_config_error_before_anything_is_built():
    given = {"cpu_offloading": True, "cpu_offloading_num_layers": 1}
    layout = parallel(pipeline=2)
    model = model_config()
    with pytest.raises(
        ConfigError, match="megatron = .*TransformerConfig of megatron-core .* rejects the options"
    ):
        check_megatron_options(given, shape_of(), layout, model, adam(1e-3), RoutingConfig())
    assert (
        check_megatron_options(
            {}, shape_of(), layout, model, adam(1e-3), RoutingConfig()
        ).transformer
        == {}
    )


def train_with(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Log-probs and gradient norms of two updates, plain and with options."""
    layout = parallel(pipeline=2)
    samples = make_samples(count=4)
    groups = groups_of(layout)
    results = {}
    for name, dtype, granularity, given in (
        ("plain", "float32", None, {}),
        ("uneven stages", "float32", None, {"num_layers_in_first_pipeline_stage": 1}),
        ("experts recomputed", "float32", "selective", {"recompute_modules": ["moe"]}),
        ("gradients added", "float32", None, {"gradient_accumulation_fusion": True}),
        ("bfloat16", "bfloat16", None, {}),
        ("bfloat16 added", "bfloat16", None, {"gradient_accumulation_fusion": True}),
        ("bfloat16 gradients", "bfloat16", None, {"grad_reduce_in_fp32": False}),
    ):
        model = model_config(path, dtype=dtype, recompute_granularity=granularity)
        sections = layout, model, adam(1e-2), RoutingConfig(metrics=False)
        options = check_megatron_options(given, shape_of(), *sections)
        policy = build_policy(model, layout, groups, optimizer=adam(1e-2), options=options)
        exported = {name: weight.clone() for name, weight in policy.weights()}
        steps = [
            train_mini_batch(
                policy,
                TrainingBatch.of(samples),
                preset("sft"),
                micro_batches_of(64),
                temperature=1.0,
            )
            for _ in range(2)
        ]
        results[name] = {
            "log_probs": [step.log_probs for step in steps],
            "grad_norm": [step.metrics["grad_norm"] for step in steps],
            "layers": len(unwrap(policy.chunks[0]).decoder.layers),
            "exported": exported,
            "gradients": next(policy.chunks[0].parameters()).main_grad.dtype,
        }
    return results


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without the CUDA extension")
def test_options_that_change_how_and_not_what_is_computed(tmp_path):
    first, last = run_distributed(train_with, 2, save_tiny_model(tmp_path / "model"))
    plain = last["plain"]
    for name in ("uneven stages", "experts recomputed", "gradients added"):
        np.testing.assert_allclose(
            last[name]["log_probs"], plain["log_probs"], atol=2e-5, err_msg=name
        )
        np.testing.assert_allclose(
            last[name]["grad_norm"], plain["grad_norm"], rtol=1e-5, err_msg=name
        )
    exported = last["uneven stages"]["exported"]
    assert exported.keys() == plain["exported"].keys()
    assert all(torch.equal(weight, plain["exported"][name]) for name, weight in exported.items())
    assert (first["uneven stages"]["layers"], last["uneven stages"]["layers"]) == (1, 3)
    assert (first["plain"]["layers"], last["plain"]["layers"]) == (2, 2)
    bfloat16 = last["bfloat16 gradients"]
    assert (
        bfloat16["gradients"] == torch.bfloat16 and last["bfloat16"]["gradients"] == torch.float32
    )
    np.testing.assert_array_equal(bfloat16["log_probs"][0], last["bfloat16"]["log_probs"][0])
    added = last["bfloat16 added"]
    np.testing.assert_array_equal(added["log_probs"], last["bfloat16"]["log_probs"])
    np.testing.assert_allclose(bfloat16["grad_norm"], last["bfloat16"]["grad_norm"], rtol=0.1)
