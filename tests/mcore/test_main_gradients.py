"""Gradients that are added straight to Megatron's buffers are those that its hooks would add."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from megatron_gspo.algorithms import preset
from megatron_gspo.config import LoRAConfig
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore import embedding, operators
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.policy import Policy, TrainedParts, build_policy
from megatron_gspo.mcore.train_step import forward_backward, pack_mini_batch
from megatron_gspo.parallel import log_probs
from tests.equivalence.cases import make_samples
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model

OVERLAP = dict(overlap_grad_reduce=True, overlap_param_gather=True)
LORA = LoRAConfig(rank=2)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "data": ("moe", {}, {}),
    "overlapped": ("moe", OVERLAP, {}),
    "bfloat16, grouped": ("moe", {}, dict(dtype="bfloat16")),
    "tensor": ("moe", dict(tensor=2), {}),
    "pipeline": ("moe", dict(pipeline=2), {}),
    "expert": ("moe", dict(expert=2), {}),
    "recomputed": ("moe", {}, dict(recompute_granularity="full")),
    "adapters": ("moe", dict(expert=2), dict(lora=LORA)),
    "tied": ("tied", OVERLAP, {}),
    "tied, pipeline": ("tied", dict(pipeline=2), {}),
    "tied, tensor": ("tied", dict(tensor=2), {}),
}
"""Model, layout, and what else is special."""

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"


@contextmanager
def hooks_add() -> Iterator[None]:
    """Within the context no backward pass adds to Megatron's buffers itself."""
    with (
        mock.patch.object(embedding, "main_gradient", lambda weight: None),
        mock.patch.object(log_probs, "main_gradient", lambda weight: None),
        mock.patch.object(operators, "main_gradients", lambda weights: None),
    ):
        yield


@contextmanager
def grouped_products(wanted: bool) -> Iterator[None]:
    """Within the context experts are multiplied as on a GPU, if that is wanted."""
    if not wanted:
        yield
        return
    with mock.patch.object(operators, "grouped_products_apply", lambda x, *widths: True):
        yield


def fill_adapters(policy: Policy) -> None:
    """With their first values, of which B is 0, the gradient of A is 0."""
    torch.manual_seed(0)
    for chunk in policy.chunks:
        for name, parameter in unwrap(chunk).named_parameters():
            if name.endswith("lora_B"):
                parameter.data.normal_()


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """Of a forward and backward pass over several micro-batches."""
    batch = TrainingBatch.of(make_samples(0, count=4))
    batches = pack_mini_batch(policy, batch, micro_batches_of(24), optional=(), routing=None)
    assert len(batches.batches) > 1
    forward_backward(policy, preset("sft"), batches, temperature=1.0)
    return {
        f"{i}.{name}": parameter.main_grad.clone()
        for i, chunk in enumerate(policy.chunks)
        for name, parameter in unwrap(chunk).named_parameters()
        if parameter.requires_grad
    }


def compare(rank: int, world_size: int, paths: dict[str, str]) -> dict[str, dict[str, Any]]:
    """For each case the largest differences, relative to a gradient's largest element, and the
    parameters whose gradient no hook has added."""
    results = {}
    for case, (model, sizes, options) in CASES.items():
        options = dict(options)
        lora = options.pop("lora", None)
        layout = parallel(**sizes)
        policy = build_policy(
            model_config(paths[model], **options),
            layout,
            groups_of(layout),
            optimizer=adam(lr=1e-2),
            parts=TrainedParts(lora=lora),
        )
        fill_adapters(policy)
        by_case = {}
        for name, context in (("hooks", hooks_add()), ("direct", nullcontext())):
            with context, grouped_products("grouped" in case):
                by_case[name] = gradients(policy)
        results[case] = {
            "differences": {
                name: float((gradient - by_case["hooks"][name]).abs().max() / gradient.abs().max())
                for name, gradient in by_case["direct"].items()
                if gradient.any() or by_case["hooks"][name].any()
            },
            "direct": {
                name
                for chunk in policy.chunks
                for name, parameter in unwrap(chunk).named_parameters()
                if getattr(parameter, "grad_added_to_main_grad", False)
            },
            "left": [
                name
                for chunk in policy.chunks
                for name, parameter in unwrap(chunk).named_parameters()
                if parameter.grad is not None
            ],
        }
    return results


def test_gradients_are_those_of_the_hooks(tmp_path):
    paths = {
        "moe": save_tiny_model(tmp_path / "moe"),
        "tied": save_tiny_model(tmp_path / "tied", "dense", tie_word_embeddings=True),
    }
    ranks = run_distributed(compare, 2, paths)
    for rank, results in enumerate(ranks):
        for case, result in results.items():
            where = f"{case}, rank {rank}"
            # In bfloat16 the hooks add gradients that are rounded.
            allowed = 2e-2 if "bfloat16" in case else 2e-6
            assert result["differences"], where
            assert max(result["differences"].values()) <= allowed, (where, result["differences"])
            assert not result["left"], where

    def added(case: str) -> set[str]:
        return set().union(*(results[case]["direct"] for results in ranks))

    everything = [
        case
        for case, (model, _, options) in CASES.items()
        if model == "moe" and "lora" not in options
    ]
    for case in everything:
        assert {EMBEDDING, HEAD} <= added(case), case
        assert any("linear_fc1.weight" in name for name in added(case)), case
        assert any("linear_fc2.weight" in name for name in added(case)), case
        assert not any("layernorm" in name or "linear_qkv" in name for name in added(case)), case
    assert all(".experts." in name and "lora_A" in name for name in added("adapters"))
    assert added("adapters")
    assert added("tied") == added("tied, tensor") == {EMBEDDING}
    assert added("tied, pipeline") == {EMBEDDING, HEAD}
