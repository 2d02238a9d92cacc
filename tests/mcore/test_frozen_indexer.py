"""The indexers of sparse attention: part of the weights, and not trained."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megatron_gspo.mcore.checkpoint.save_load import load_checkpoint, save_checkpoint
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.indexer import Indexer
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.policy_tensors import torch_optimizers
from megatron_gspo.mcore.routing_replay.replay_options import ReplayOptions
from megatron_gspo.models.hf_checkpoint import CheckpointReader
from tests.support.configs import parallel
from tests.support.distributed import run_distributed
from tests.support.routing_cases import policy_of, run_pass, scored_samples, shape_of
from tests.support.tiny_models import save_tiny_model

LAYOUT = parallel(tensor=2, expert=2)


def frozen(policy: Policy) -> list[torch.nn.Parameter]:
    modules = (module for chunk in policy.chunks for module in unwrap(chunk).modules())
    return [p for module in modules if isinstance(module, Indexer) for p in module.parameters()]


def sent(policy: Policy) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in policy.weights() if ".indexer." in name}


def train_and_load(
    rank: int, world_size: int, path: str, folder: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """What is sent of the indexers after a step of training in bfloat16, and after its checkpoint
    was loaded; and how many of their parameters have a gradient or are in an optimizer."""
    policy = policy_of(path, LAYOUT, dtype="bfloat16")
    run_pass(policy, scored_samples(), ReplayOptions(shape_of(policy)))
    policy.optimizer.step()
    after = sent(policy)
    parameters = frozen(policy)
    saved = save_checkpoint(policy, Path(folder), 1, {}, keep=1)
    for parameter in parameters:
        parameter.data.zero_()
    load_checkpoint(policy, saved)
    optimized = {
        id(parameter)
        for optimizer in torch_optimizers(policy.optimizer)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    trained = [p for p in parameters if hasattr(p, "main_grad") or id(p) in optimized]
    assert len(parameters) == 4 * 5
    return after, sent(policy), len(trained)


def test_they_keep_their_bits_in_training_checkpoints_and_streams(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "deepseek_v32", dtype=torch.bfloat16)
    with CheckpointReader(path) as reader:
        expected = {name: reader.read(name) for name in reader.names if ".indexer." in name}
    norms = [value for name, value in expected.items() if ".k_norm." in name]
    assert any(not torch.equal(value, value.bfloat16().float()) for value in norms)
    for after, again, trained in run_distributed(train_and_load, 2, path, str(tmp_path)):
        assert trained == 0
        for stream in (after, again):
            assert set(stream) == set(expected)
            for name, value in expected.items():
                assert stream[name].dtype == value.dtype, name
                assert torch.equal(stream[name], value), name
