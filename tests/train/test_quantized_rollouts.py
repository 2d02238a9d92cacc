"""Rollouts in eight bits: the engine samples from the dequantised weights, the trainer trains
its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_gspo.config import Config
from megatron_gspo.data.sample import Sample
from megatron_gspo.loop.hf_export import export
from megatron_gspo.loop.setup import build_components
from megatron_gspo.models.hf_checkpoint import CheckpointReader, write_checkpoint
from tests.support.distributed import run_distributed
from tests.support.training_runs import base_config, first_step, tiny_model

MODULES = ["model.layers.*.self_attn.*", "model.layers.*.mlp.experts.*.*"]
EXCLUDE = ["lm_head", "model.layers.*.mlp.gate"]


def plain(folder: Any, name: str, **sections: dict[str, Any]) -> dict[str, Any]:
    rollout: dict[str, Any] = {
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "max_response_length": 6,
    }
    lists = {} if name == "none" else {"modules": MODULES, "exclude": EXCLUDE}
    rollout["quantization"] = {"format": name, **lists}
    return base_config(
        str(folder / "model"),
        folder / "run",
        rollout=rollout,
        routing={"metrics": False},
        **sections,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized")
    tiny_model(folder / "model")
    return folder


def one_step(
    rank: int, world: int, config: dict[str, Any]
) -> tuple[list[Sample], dict[str, float]]:
    return first_step(Config.from_dict(config))


def log_probs(model: Any, sample: Sample) -> np.ndarray:
    tokens = torch.as_tensor(sample.tokens)
    with torch.no_grad():
        all_log_probs = model(tokens[None]).logits[0].double().log_softmax(-1)
    positions = torch.arange(sample.prompt_length, len(tokens))
    return all_log_probs[positions - 1, tokens[positions]].numpy()


def test_samples_are_scored_by_the_dequantised_weights_and_trained_by_the_others(folder):
    """Against Transformers, which dequantises a checkpoint of the same stream itself."""
    config = plain(folder, "fp8_block")
    samples, metrics = run_distributed(one_step, 1, config)[0]
    plan = Config.from_dict(config).quantization_plan
    with CheckpointReader(folder / "model") as reader:
        tensors = [(name, reader.read(name)) for name in sorted(reader.names)]
    write_checkpoint(
        folder / "fp8", plan.quantize(tensors), source=folder / "model", quantization=plan.config
    )
    quantised, exact = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        for name in ("fp8", "model")
    )
    gap = 0.0
    for sample in samples:
        theirs = log_probs(quantised, sample)
        ours = log_probs(exact, sample)
        np.testing.assert_allclose(sample.rollout_log_probs, theirs, atol=2e-5)
        np.testing.assert_allclose(sample.old_log_probs, ours, atol=2e-5)
        gap = max(gap, float(np.abs(ours - theirs).max()))
    assert gap > 1e-3
    assert metrics["mismatch/abs_diff_max"] == pytest.approx(gap, rel=1e-2)


def export_and_streams(
    rank: int, world: int, config: dict[str, Any], out: str
) -> list[dict[str, torch.Tensor]]:
    """What each source sends, and all ranks get, and the exported model, which is not quantised."""
    with build_components(Config.from_dict(config)) as run:
        streams = [dict(run.weights(source)) for source in run.policy.sources]
        export(run.policy, out)
        return [*streams, dict(run.weights())]


def test_every_layout_sends_the_same_bytes(folder, tmp_path):
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    config = plain(folder, "fp8_block", parallel=sizes)
    by_rank = run_distributed(export_and_streams, 2, config, tmp_path / "hf")
    with CheckpointReader(folder / "model") as reader:
        exact = {name: reader.read(name) for name in reader.names}
    expected = dict(Config.from_dict(config).quantization_plan.quantize(exact.items()))
    sent = {
        name: tensor
        for streams in by_rank
        for stream in streams[:-1]
        for name, tensor in stream.items()
    }
    for stream in (sent, *(streams[-1] for streams in by_rank)):
        assert stream.keys() == expected.keys()
        for name, tensor in stream.items():
            assert tensor.dtype == expected[name].dtype
            assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name
    with CheckpointReader(tmp_path / "hf") as reader:
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in exact.items())
