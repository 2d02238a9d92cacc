"""A source that can't send reports the reason. Transfers: tests/rollout/test_weight_distribution.py."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_gspo.config import ServerConfig
from megatron_gspo.errors import DiskError, InputError
from megatron_gspo.rollout.sglang.sglang_weight_endpoints import SGLangWeightEndpoints
from megatron_gspo.weight_transport.transport import Sent
from megatron_gspo.weight_transport.weight_sender import WeightSender
from megatron_gspo.weight_transport.weight_update import make_transport


def test_errors_are_values_and_the_stream_is_read_to_its_end(tmp_path: Path) -> None:
    config = ServerConfig(weight_transport="disk", weight_dir=str(tmp_path))
    sender = WeightSender(config, make_transport(config, SGLangWeightEndpoints()))
    one = ("a", torch.ones(2))
    missing, twice = iter([one]), iter([one, one, one])
    assert isinstance(sender.send([], missing, version="v:1"), DiskError)  # the directory is not prepared
    sender.transport.prepare("v:1")
    found = sender.send([], twice, version="v:1")
    assert isinstance(found, InputError) and str(found) == "a comes twice in the stream of weights"
    assert next(missing, None) is None and next(twice, None) is None
    assert sender.send([], iter([one]), version="v:1", part=3) == Sent()
    assert {file.name for file in tmp_path.rglob("*-00003*")} == {"model-00003-00001.safetensors", "part-00003.json"}
    sender.close()
    sender.close()
