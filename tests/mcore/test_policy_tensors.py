"""What a policy holds between steps, against the model's own parameters and Adam's two moments."""

import pytest
import torch

from megatron_gspo.mcore.policy import build_policy
from megatron_gspo.mcore.policy_tensors import (
    gradients,
    optimizer_states,
    torch_optimizers,
    weights,
)
from tests.support.configs import adam, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model


def sizes(rank: int, world: int, path: str, dtype: str) -> dict[str, int]:
    layout = parallel(use_distributed_optimizer=False)
    groups = groups_of(layout)
    policy = build_policy(model_config(path, dtype=dtype), layout, groups, optimizer=adam(lr=1e-3))
    reference = build_policy(model_config(path, dtype=dtype), layout, groups, optimizer=None)
    for inner in torch_optimizers(policy.optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        inner.step()
    owned = {parameter.untyped_storage()._cdata for parameter in weights(policy.chunks)}
    states = list(optimizer_states(policy.chunks, policy.optimizer))
    assert not owned & {tensor.untyped_storage()._cdata for tensor in states}
    assert list(gradients(reference.chunks)) == list(optimizer_states(reference.chunks, None)) == []
    return {
        "weights": sum(tensor.numel() for tensor in weights(policy.chunks)),
        "gradients": sum(tensor.numel() for tensor in gradients(policy.chunks)),
        "states": sum(tensor.numel() for tensor in states if tensor.dim()),
    }


# Adam's moments, and in bfloat16 a main parameter.
@pytest.mark.parametrize(("dtype", "states"), [("float32", 2), ("bfloat16", 3)])
def test_weights_have_a_gradient_and_states(tmp_path, dtype, states):
    [counts] = run_distributed(sizes, 1, save_tiny_model(tmp_path / "model"), dtype)
    assert counts["gradients"] >= counts["weights"] > 10_000  # the buffers are padded
    assert counts["states"] == states * counts["weights"]
