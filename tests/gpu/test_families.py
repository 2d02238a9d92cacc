"""Every model family of the equivalence proof in bfloat16 against Transformers in float64, on given
routes.

The models are tiny: what is tested is that each module runs on the device and rounds where it
should. `test_layouts.py` has them in float32.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_gspo.mcore.policy import build_policy
from tests.equivalence.cases import stack
from tests.equivalence.measure import DENSE_MODELS, MODELS
from tests.equivalence.run import run_pass
from tests.equivalence.truth import expect
from tests.gpu.errors import check, relative_to_spread
from tests.gpu.test_layers import SCENARIO, norm
from tests.gpu.tolerances import of_gradients, of_layers, unit_roundoff
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.tiny_models import save_tiny_model
from tests.support.transformers_reference import load_reference


def facts_of(name: str) -> dict[str, object]:
    """Of a model whose tokens attend all before them. Which of them an indexer selects is another
    choice in bfloat16, and no selection is given.
    """
    facts = MODELS[name]
    return facts | {"index_topk": 64} if name in ("deepseek_v32", "glm_dsa") else facts


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_and_gradients_in_bfloat16(device, groups, name, tmp_path, record_property):
    path = save_tiny_model(tmp_path, dtype=torch.bfloat16, **facts_of(name))
    scenario = replace(SCENARIO, replay=name not in DENSE_MODELS)
    expected = expect(load_reference(path), scenario)
    model = model_config(path, dtype="bfloat16", implementation="torch")
    policy = build_policy(model, parallel(), groups, optimizer=adam(lr=1e-3), total_steps=4)
    result = run_pass(policy, scenario, micro_batches_of(80), expected.samples)
    depth = dict(layers=policy.config.num_layers, terms=policy.config.hidden_size)
    unit = unit_roundoff("bfloat16", device)
    trained = expected.batch.loss_mask > 0
    log_probs = stack(result.log_probs)[trained], expected.batch.log_probs[trained]
    assert relative_to_spread(*log_probs) < of_layers(unit, "bfloat16", **depth)
    assert result.gradients.keys() == expected.gradients.keys()
    off = {key: value.double() - expected.gradients[key] for key, value in result.gradients.items()}
    error = norm(off) / norm(expected.gradients)
    check(record_property, {"the whole gradient": error}, of_gradients(unit, "bfloat16", **depth))
