"""Whole models of our torch layers and of Transformer Engine's against Transformers in float64, on
given routes.

The routes are random and replayed on both sides: in bfloat16 the routers would choose other experts
than in float64, and the difference would not measure the layers.
"""

from __future__ import annotations

import math

import pytest
import torch

from megatron_gspo.algorithms import preset
from megatron_gspo.mcore.policy import Policy, build_policy
from megatron_gspo.mcore.process_groups import ProcessGroups
from tests.equivalence.cases import Scenario, stack
from tests.equivalence.run import run_pass
from tests.equivalence.truth import Expected, expect
from tests.gpu.errors import check, relative_to_spread
from tests.gpu.sizes import Sizes
from tests.gpu.tolerances import of_gradients, of_layers, unit_roundoff
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.tiny_models import save_tiny_model
from tests.support.transformers_reference import load_reference, worst_error

# No ratio is near a clip: there a rounding would decide on a whole token's gradient.
OBJECTIVE = preset("grpo", epsilon_low=0.9, epsilon_high=9.0, entropy_coef=0.01, kl_loss_coef=0.1)
SCENARIO = Scenario(OBJECTIVE, spread=0.1, per_token=True, temperature=0.8, replay=True)
NO_ATTENTION = (  # Transformer Engine's message where no kernel takes the inputs
    "No dot product attention"
)

Truths = dict[str, tuple[str, Expected]]


@pytest.fixture(scope="module")
def truths(sizes: Sizes, tmp_path_factory: pytest.TempPathFactory) -> Truths:
    """By dtype: a model whose weights that dtype holds exactly, and what is expected of it."""
    expected = {}
    for dtype in ("float32", "bfloat16"):
        path = save_tiny_model(
            tmp_path_factory.mktemp("models") / dtype, dtype=getattr(torch, dtype), **sizes.model
        )
        expected[dtype] = path, expect(load_reference(path), SCENARIO, scale=sizes.scale)
    return expected


def policy_of(path: str, groups: ProcessGroups, dtype: str, implementation: str) -> Policy:
    model = model_config(path, dtype=dtype, implementation=implementation)
    return build_policy(model, parallel(), groups, optimizer=adam(lr=1e-3), total_steps=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_and_gradients(
    device, groups, sizes, truths, implementation, dtype, record_property
):
    path, expected = truths[dtype]
    policy = policy_of(path, groups, dtype, implementation)
    batching = micro_batches_of(80 * sizes.scale)
    try:
        result = run_pass(policy, SCENARIO, batching, expected.samples)
    except Exception as error:
        if implementation == "transformer_engine" and NO_ATTENTION in str(error):
            pytest.skip(
                f"Transformer Engine has no {dtype} attention for packed sequences: {error}"
            )
        raise
    unit = unit_roundoff(dtype, device, implementation)
    terms = max(policy.config.hidden_size, sum(sample.length for sample in expected.samples))
    depth = dict(layers=policy.config.num_layers, terms=terms)
    trained = expected.batch.loss_mask > 0
    log_probs = stack(result.log_probs)[trained], expected.batch.log_probs[trained]
    assert relative_to_spread(*log_probs) < of_layers(unit, dtype, **depth)
    parameter, gradient = worst_error(result.gradients, expected.gradients)
    errors = {
        "norm of the gradient": abs(norm(result.gradients) / norm(expected.gradients) - 1),
        f"gradient of {parameter}": gradient,
    }
    check(record_property, errors, of_gradients(unit, dtype, **depth))


def norm(tensors: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(value.double().norm()) ** 2 for value in tensors.values()))
