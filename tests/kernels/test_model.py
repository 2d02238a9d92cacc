"""A model's gradients with the kernels are those of plain torch."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_gspo.algorithms import preset
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore import embedding, gated_units, rotated_attention, token_copies
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.policy import Policy, build_policy
from megatron_gspo.mcore.train_step import forward_backward, pack_mini_batch
from megatron_gspo.parallel import vocabulary_tiles
from tests.equivalence.cases import make_samples
from tests.equivalence.measure import MODELS
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model

OPERATORS = {
    embedding: ("add_embedding_gradient",),
    gated_units: ("scaled_gated_unit", "scaled_gated_unit_backward"),
    rotated_attention: ("rotated_heads",),
    token_copies: ("copy_rows", "sum_rows"),
    vocabulary_tiles: ("logit_gradient", "logit_statistics"),
}


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """Of one micro-batch."""
    batch = TrainingBatch.of(make_samples(0, count=2))
    batches = pack_mini_batch(policy, batch, micro_batches_of(64), optional=(), routing=None)
    forward_backward(policy, preset("sft"), batches, temperature=1.0)
    return {
        name: parameter.main_grad.clone()
        for name, parameter in unwrap(policy.chunks[0]).named_parameters()
    }


def differences(
    rank: int, world_size: int, path: str, sizes: dict[str, int]
) -> tuple[dict[str, float], dict[str, int]]:
    """Of the gradients, relative to the largest of each; and how often each operator was called."""
    layout = parallel(**sizes)
    policy = build_policy(model_config(path), layout, groups_of(layout), optimizer=adam(lr=1e-2))
    expected = gradients(policy)
    calls = {}
    with ExitStack() as stack:
        for module, names in OPERATORS.items():
            stack.enter_context(
                mock.patch.object(module, "row_kernels_apply", lambda x, name: True)
            )
            for name in names:
                counted = mock.Mock(side_effect=getattr(module, name))
                calls[name] = stack.enter_context(mock.patch.object(module, name, counted))
        actual = gradients(policy)
    errors = {
        name: float((gradient - expected[name]).abs().max() / expected[name].abs().max())
        for name, gradient in actual.items()
        if expected[name].any()
    }
    return errors, {name: call.call_count for name, call in calls.items()}


@pytest.mark.parametrize(
    "kind, sizes",
    [
        ("moe", {}),
        ("moe", {"tensor": 2, "expert": 2}),
        ("shared", {}),
        ("next", {}),
        ("deepseek", {"expert": 2}),
        ("gpt_oss", {"tensor": 2, "expert": 2}),
        ("qwen35_moe", {"context": 2}),
    ],
    ids=[
        "alone",
        "divided",
        "biases and no norms",
        "gates",
        "latent attention, divided",
        "sinks and limits, divided",
        "delta nets, divided",
    ],
)
def test_gradients(tmp_path: Any, kind: str, sizes: dict[str, int]) -> None:
    """Latent attention and heads with gates are left out by the kernel."""
    path = save_tiny_model(tmp_path / "model", **MODELS[kind])
    results = run_distributed(differences, max([1, *sizes.values()]), path, sizes)
    for errors, calls in results:
        assert max(errors.values()) < 1e-5, errors
        left_out = {"rotated_heads"} if kind in ("next", "deepseek", "qwen35_moe") else set()
        assert {name for name, count in calls.items() if not count} == left_out
