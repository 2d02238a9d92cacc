"""The patch of the worker extension, on a class like vLLM's.

With real servers: tests/vllm/test_weights.py.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_gspo.rollout.vllm.vllm_launch import EXTENSION_FOLDER
from megatron_gspo.weight_transport.receiver_transport import RECEIVER_FOLDER


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXTENSION_FOLDER), str(RECEIVER_FOLDER), *sys.path])
    return importlib.import_module("megatron_gspo_worker")


class Kernel:
    def __init__(self) -> None:
        self.fused_experts = self
        self.packed = []

    def process_weights_after_loading(self, layer: str) -> None:
        self.packed.append(layer)


class Runner:
    """As `GPUModelRunner` of 0.32.0 on a CPU: a draw for each request, of which those of unfinished
    prompts are dropped."""

    def __init__(self, seeds: list[int], dropped: list[bool]) -> None:
        made = {i: torch.Generator().manual_seed(seed) for i, seed in enumerate(seeds)}
        self.input_batch = SimpleNamespace(num_reqs=len(seeds), generators=made)
        self.discard_request_mask = SimpleNamespace(np=np.array([*dropped, True]))

    def _sample(self) -> list[float]:
        return [
            float(torch.rand((), generator=made)) for made in self.input_batch.generators.values()
        ]

    def _bookkeeping_sync(self) -> None:
        for i in np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]:
            generator = self.input_batch.generators.get(int(i))
            if generator is not None:
                generator.set_offset(generator.get_offset() - 4)


def test_a_dropped_draw_is_drawn_again(worker):
    def step(runner: Runner) -> list[float]:
        drawn = runner._sample()
        runner._bookkeeping_sync()
        return drawn

    with pytest.raises(RuntimeError, match="CPU Generator does not use offset"):
        step(Runner([1, 2], [True, False]))
    expected = [Runner([seed], [False])._sample()[0] for seed in (1, 2)]
    worker.undo_dropped_draws(Runner)
    worker.undo_dropped_draws(Runner)
    runner = Runner([1, 2], [True, False])
    assert step(runner) == expected
    again = step(runner)
    assert again[0] == expected[0] and again[1] != expected[1]
    assert len(runner.input_batch.generators) == 2


def test_experts_are_packed_once_after_every_load(worker):
    class Method:
        """As `UnquantizedFusedMoEMethod` of 0.32.0: it packs after the first load alone."""

        def __init__(self) -> None:
            self.moe_kernel = None

        def _setup_kernel(self, layer, w13, w2):
            if self.moe_kernel is None:
                self.moe_kernel = Kernel()
                self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    unpatched = Method()
    patched = Method()
    for layer in ("first", "update"):
        unpatched._setup_kernel(layer, None, None)
    assert unpatched.moe_kernel.packed == ["first"], "else the patch is not needed"
    worker.pack_reloaded_experts(Method)
    worker.pack_reloaded_experts(Method)
    for layer in ("first", "update", "another"):
        patched._setup_kernel(layer, None, None)
    assert patched.moe_kernel.packed == ["first", "update", "another"]
