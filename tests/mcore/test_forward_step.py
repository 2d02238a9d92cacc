"""The forward step around a model: what it refuses, and that it leaves the model as it was. Its
log-probs, its loss and the scale of that are in tests/equivalence.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_gspo.algorithms import preset
from megatron_gspo.data.packing import count_trained, pack
from megatron_gspo.mcore.forward_step import hidden_states, policy_forward_step
from megatron_gspo.mcore.model import build_model
from tests.equivalence.cases import make_samples
from tests.mcore.test_model import shape_of
from tests.support.configs import model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of


def refusals(rank: int, world_size: int) -> tuple[str, str, bool]:
    """The messages for a loss per token and for a model that fails; whether the output layer is
    as it was.
    """
    groups = groups_of(parallel())
    [model] = build_model(shape_of(), parallel(), model_config(), groups)
    samples = make_samples(count=3)
    sequences, tokens = count_trained(samples)
    batch = pack(samples, num_sequences=sequences, num_tokens=tokens)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    model.decoder.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError) as failure:
        hidden_states(model, batch, groups)
    model.config.calculate_per_token_loss = True
    with pytest.raises(ValueError) as refusal:
        policy_forward_step(preset("gspo"), num_microbatches=1, groups=groups)(iter([batch]), model)
    return str(refusal.value), str(failure.value), "forward" not in vars(model.output_layer)


def test_a_loss_per_token_is_refused_and_a_failure_leaves_no_trace():
    [(refusal, failure, restored)] = run_distributed(refusals, 1)
    assert "calculate_per_token_loss=True" in refusal and failure == "out of memory" and restored
