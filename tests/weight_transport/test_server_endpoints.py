"""What an engine must define for weight updates, and that SGLang's endpoints define it."""

from __future__ import annotations

import inspect

import pytest

from megatron_gspo.rollout.sglang.sglang_weight_endpoints import SGLangWeightEndpoints
from megatron_gspo.weight_transport.server_endpoints import WeightEndpoints

METHODS = [name for name, _ in inspect.getmembers(WeightEndpoints, inspect.isfunction) if not name.startswith("_")]


def test_there_is_a_method_for_every_step_of_an_update():
    steps = {"server_info", "pause", "begin_update", "end_update", "flush_cache", "set_version", "weight_version",
             "resume"}  # fmt: skip
    ways = {"load_checkpoint", "load_adapters", "load_adapter_payloads", "load_payloads", "init_group",
            "load_broadcast", "destroy_group", "receive"}  # fmt: skip
    proof = {"clear_weights", "unwritten"}
    assert set(METHODS) == steps | ways | proof


@pytest.mark.parametrize("name", METHODS)
def test_sglangs_endpoints_take_the_same_arguments(name):
    wanted, found = (getattr(kind, name) for kind in (WeightEndpoints, SGLangWeightEndpoints))
    assert inspect.iscoroutinefunction(found)
    assert inspect.signature(found) == inspect.signature(wanted)


def test_requests_of_groups_are_named_in_messages():
    assert SGLangWeightEndpoints.init_group_path == "/init_weights_update_group"
    assert SGLangWeightEndpoints.broadcast_path == "/update_weights_from_distributed"
