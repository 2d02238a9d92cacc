"""Every parallel layout against Transformers in float64 and a naive loop: log-probs, loss, every gradient, metrics.

Tolerance: the Megatron side computes in float32, where a sum of a few thousand rounded terms is off by about 1e-6
relative; parallel layouts add the same terms in another order. 1e-5 leaves a factor of ten; a missing reduction or a
wrong scale is off by 1e-1 and more.
"""

from __future__ import annotations

import copy

import pytest
import torch

from tests.distributed import run_distributed
from tests.equivalence.cases import Case, make_samples, run_case, stack, with_old_log_probs
from tests.models import save_tiny_model
from tests.reference import checkpoint_gradients, load_reference, naive_loss, response_log_probs, worst_error

TOLERANCE = 1e-5
# about the distance of the sequence ratios from 1, so that some are clipped and some are not
SPREAD = {"gspo": 4e-4, "gspo_token": 4e-4, "grpo": 0.2, "dapo": 0.2, "dr_grpo": 0.2, "sft": 0.2}

MOE = [
    Case(),
    Case(max_tokens=200),
    Case(micro_batch_size=1),
    Case(2, dict(tensor=2)),
    Case(2, dict(tensor=2, expert=2)),
    Case(2, dict(tensor=2, expert_tensor=2)),
    Case(4, dict(tensor=2, expert=2, expert_tensor=2)),
    Case(2, dict(expert=2)),
    Case(2, dict(expert=2), dict(dispatcher="allgather")),
    Case(2, dict(tensor=2, expert=2), dict(dispatcher="allgather")),
    Case(2, dict(context=2)),
    Case(2, dict(context=2, expert=2)),
    Case(2, dict(pipeline=2)),
    Case(2, dict(pipeline=2, virtual_pipeline=2)),
    Case(2, {}),
    Case(2, dict(expert_tensor=2)),
    Case(1, {}, dict(recompute="full")),
    Case(2, dict(tensor=2), dict(recompute="selective")),
    Case(4, dict(tensor=2, pipeline=2, expert=2), dict(recompute="full")),
    Case(4, dict(tensor=2, context=2, expert=2)),
    Case(8, dict(tensor=2, pipeline=2, context=2, expert=4)),
    Case(8, dict(tensor=2, pipeline=2, expert=2, virtual_pipeline=2)),
    Case(objective="gspo_token"),
    Case(4, dict(tensor=2, context=2), objective="gspo_token"),
    Case(2, dict(context=2), objective="grpo", overrides=dict(kl_loss_coef=0.1, entropy_coef=0.01)),
    Case(4, dict(tensor=2, expert=2), objective="grpo", overrides=dict(kl_loss_coef=0.1, entropy_coef=0.01)),
    Case(2, dict(context=2), objective="dapo"),
    Case(2, dict(tensor=2), objective="dr_grpo", overrides=dict(constant_length=16)),
    Case(2, dict(context=2), objective="sft"),
]
DENSE = [
    Case(),
    Case(2, dict(tensor=2)),
    Case(2, dict(tensor=2), dict(sequence_parallel=False)),
    Case(2, dict(context=2)),
    Case(2, dict(pipeline=2)),
    Case(8, dict(tensor=2, pipeline=2, context=2)),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "moe": save_tiny_model(folder / "moe"),
        "dense": save_tiny_model(folder / "dense", "dense"),
        "tied": save_tiny_model(folder / "tied", "dense", tie_word_embeddings=True, vocab_size=95),
        "mixed": save_tiny_model(folder / "mixed", "moe", mlp_only_layers=[1], norm_topk_prob=False),
    }


def check(path: str, case: Case) -> None:
    model = load_reference(path)
    vocab = model.config.vocab_size
    samples = make_samples(per_token=case.objective in ("gspo_token", "grpo"), vocab_size=vocab)
    exact = [response_log_probs(model, sample) for sample in samples]
    samples = with_old_log_probs(samples, [lp.detach().numpy() for lp, _ in exact], SPREAD[case.objective])
    results = run_distributed(run_case, case.world_size, path, case, copy.deepcopy(samples), timeout=180)
    objective_loss = naive_loss(_objective(case), model, samples)
    objective_loss.backward()

    for result in results:
        for key, which in (("log_probs", 0), ("entropy", 1)):
            expected = torch.cat([pair[which].detach() for pair in exact])
            assert torch.allclose(stack(result[key]).double(), expected, atol=2e-5, rtol=0), f"{key}"
        # terms as large as a log-prob, 4.6, cancel in the loss: float32 rounds each of them by up to 2.4e-7
        assert result["metrics"]["loss"] == pytest.approx(float(objective_loss), rel=TOLERANCE, abs=5e-7)
        assert result["metrics"] == results[0]["metrics"], "metrics differ between ranks"
    name, error = worst_error(results[0]["gradients"], checkpoint_gradients(model))
    assert error < TOLERANCE, f"gradient of {name} is off by {error:.1e}"


def _objective(case: Case):
    from megatron_gspo.algorithms import preset

    return preset(case.objective, **case.overrides)


@pytest.mark.parametrize("case", MOE, ids=lambda case: case.name)
def test_moe_equals_transformers(models, case):
    check(models["moe"], case)


@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.name)
def test_dense_equals_transformers(models, case):
    check(models["dense"], case)


@pytest.mark.parametrize(
    "case", [Case(), Case(2, dict(tensor=2)), Case(2, dict(pipeline=2))], ids=lambda case: case.name
)
def test_tied_embeddings_and_padded_vocabulary(models, case):
    check(models["tied"], case)


@pytest.mark.parametrize(
    "case", [Case(), Case(2, dict(pipeline=2)), Case(2, dict(expert=2))], ids=lambda case: case.name
)
def test_dense_layers_between_experts_and_unnormalised_top_k(models, case):
    check(models["mixed"], case)
