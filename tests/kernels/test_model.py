"""A model of each family with the kernels: log-probs and gradients are those of plain torch, which
the layouts compare with float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

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

UNIT = ("scaled_gated_unit", "scaled_gated_unit_backward")
COPIES = ("copy_rows", "sum_rows")
HEADS = ("rotated_heads",)
OPERATORS = {
    embedding: ("add_embedding_gradient",),
    gated_units: UNIT,
    rotated_attention: HEADS,
    token_copies: COPIES,
    vocabulary_tiles: ("logit_gradient", "logit_statistics"),
}

# Of the layouts' models: a layer of each kind is enough here.
ONE = dict(num_hidden_layers=1)
TWO = dict(num_hidden_layers=2)  # the first has no experts
DELTA = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
FEWER: dict[str, dict[str, object]] = {
    "moe": ONE,
    "dense": ONE,
    "shared": ONE,
    "next": DELTA | dict(mlp_only_layers=[]),
    "qwen35_moe": DELTA,
    "qwen35": DELTA,
    "deepseek": TWO,
    "moonlight": TWO,
    "kimi": TWO,
    "deepseek_v32": TWO,
    "glm": TWO,
    "glm_lite": TWO,
    "glm_dsa": TWO,
    "minimax": ONE,
    "gpt_oss": ONE,
    "nemotron": dict(num_hidden_layers=4, hybrid_override_pattern="ME*-"),
}
# What a family has in a form of its own: gates of attention, latents, norms over all heads, no
# rotation, experts without a gate. A tied embedding's gradient is the head's too.
WITHOUT: dict[str, tuple[str, ...]] = {
    "dense": (*UNIT, *COPIES),
    "next": HEADS,
    "qwen35_moe": HEADS,
    "qwen35": (*UNIT, *COPIES, *HEADS, "add_embedding_gradient"),
    "nemotron": (*UNIT, *HEADS),
    **dict.fromkeys(
        ("deepseek", "moonlight", "kimi", "deepseek_v32", "glm_lite", "glm_dsa", "minimax"), HEADS
    ),
}
Layouts = Mapping[str, Mapping[str, int]]
"""By family, the parallel sizes; all have as many ranks."""
ALONE: Layouts = dict.fromkeys(FEWER, {})
DIVIDED: Layouts = {
    **dict.fromkeys(FEWER, {"tensor": 2, "expert": 2}),
    "dense": {"tensor": 2},
    "qwen35": {"tensor": 2},
    "qwen35_moe": {"context": 2},
    "deepseek": {"expert": 2},
    "glm_dsa": {"expert": 2},
}
FEW_DIVIDED: Layouts = {name: DIVIDED[name] for name in ("moe", "gpt_oss")}


@dataclass(frozen=True)
class Pass:
    """Of one micro-batch. log_probs: of its tokens, in nats; gradients: by parameter."""

    log_probs: list[Tensor]
    gradients: dict[str, Tensor]


def run_pass(policy: Policy) -> Pass:
    batch = TrainingBatch.of(make_samples(0, count=3, vocab_size=policy.shape.vocab_size))
    batches = pack_mini_batch(policy, batch, micro_batches_of(64), optional=(), routing=None)
    outputs = forward_backward(policy, preset("sft"), batches, temperature=1.0)
    parameters = unwrap(policy.chunks[0]).named_parameters()
    return Pass(
        [output["log_probs"].clone() for output in outputs],
        {name: value.main_grad.clone() for name, value in parameters if value.requires_grad},
    )


def run_with_kernels(policy: Policy) -> tuple[Pass, set[str]]:
    """And the operators that were not called."""
    calls = {}
    with ExitStack() as stack:
        for module, names in OPERATORS.items():
            stack.enter_context(
                mock.patch.object(module, "row_kernels_apply", lambda x, name: True)
            )
            for name in names:
                counted = mock.Mock(side_effect=getattr(module, name))
                calls[name] = stack.enter_context(mock.patch.object(module, name, counted))
        result = run_pass(policy)
    return result, {name for name, call in calls.items() if not call.called}


def differences(
    rank: int, world_size: int, paths: Mapping[str, str], layouts: Layouts
) -> dict[str, tuple[float, dict[str, float], set[str]]]:
    """For each family the largest of log-probs, those of gradients relative to the largest entry of
    each, and the operators that were not called.
    """
    found = {}
    for family, sizes in layouts.items():
        layout = parallel(**sizes)
        groups = groups_of(layout)
        policy = build_policy(model_config(paths[family]), layout, groups, optimizer=adam(lr=1e-2))
        expected = run_pass(policy)
        actual, absent = run_with_kernels(policy)
        pairs = zip(actual.log_probs, expected.log_probs, strict=True)
        log_prob = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
        of_gradients = {}
        for name, gradient in expected.gradients.items():
            largest = float(gradient.abs().max()) or 1.0
            error = float((actual.gradients[name] - gradient).abs().max())
            of_gradients[name] = error / largest
        found[family] = log_prob, of_gradients, absent
    return found


@pytest.mark.parametrize(
    "layouts, ranks",
    [
        pytest.param(ALONE, 1, id="alone"),
        pytest.param(FEW_DIVIDED, 2, id="divided"),
        pytest.param(DIVIDED, 2, id="every family divided", marks=pytest.mark.slow),
    ],
)
def test_each_family(tmp_path: Any, layouts: Layouts, ranks: int) -> None:
    """In the same processes one after the other."""
    paths = {
        family: save_tiny_model(
            tmp_path / family, **{"kind": family, **MODELS.get(family, {}), **FEWER[family]}
        )
        for family in layouts
    }
    wrong = []
    for rank, found in enumerate(run_distributed(differences, ranks, paths, layouts, timeout=1500)):
        for family, (log_prob, gradients, absent) in found.items():
            where = f"{family}, rank {rank}"
            if not log_prob < 1e-5:
                wrong.append(f"{where}: a log-prob is off by {log_prob:.1e}")
            wrong += [
                f"{where}: {name} is off by {error:.1e}"
                for name, error in gradients.items()
                if not error < 1e-5
            ]
            if absent != set(WITHOUT.get(family, ())):
                wrong.append(f"{where}: not called were {sorted(absent)}")
    assert not wrong, "\n".join(wrong)
