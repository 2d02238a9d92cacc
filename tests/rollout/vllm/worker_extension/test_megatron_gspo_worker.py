"""The patch of the worker extension, on a class like vLLM's. With real servers: tests/vllm/test_weights.py."""

from __future__ import annotations

import importlib
import sys

import pytest

from megatron_gspo.rollout.vllm.vllm_launch import EXTENSION_FOLDER
from megatron_gspo.weight_transport.receiver_transport import RECEIVER_FOLDER


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXTENSION_FOLDER), str(RECEIVER_FOLDER), *sys.path])
    return importlib.import_module("megatron_gspo_worker")


class Kernel:
    def __init__(self) -> None:
        self.fused_experts, self.packed = self, []

    def process_weights_after_loading(self, layer: str) -> None:
        self.packed.append(layer)


def test_experts_are_packed_once_after_every_load(worker):
    class Method:
        """As `UnquantizedFusedMoEMethod` of 0.32.0: it packs after the first load alone."""

        def __init__(self) -> None:
            self.moe_kernel = None

        def _setup_kernel(self, layer, w13, w2):
            if self.moe_kernel is None:
                self.moe_kernel = Kernel()
                self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    unpatched, patched = Method(), Method()
    for layer in ("first", "update"):
        unpatched._setup_kernel(layer, None, None)
    assert unpatched.moe_kernel.packed == ["first"], "else the patch is not needed"
    worker.pack_reloaded_experts(Method)
    worker.pack_reloaded_experts(Method)
    for layer in ("first", "update", "another"):
        patched._setup_kernel(layer, None, None)
    assert patched.moe_kernel.packed == ["first", "update", "another"]
