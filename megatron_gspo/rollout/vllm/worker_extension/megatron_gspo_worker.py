"""Receives weights inside of a vLLM server: ``--worker-extension-cls
megatron_gspo_worker.WeightReceiver``.

vLLM mixes the class into its worker, so that /collective_rpc calls its methods in each
tensor-parallel rank. The server's environment has none of this project but this file and
``megatron_gspo_receiver``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import megatron_gspo_receiver

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, VllmConfig
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_MARK = "_megatron_gspo_patch"  # on a replacement: the original (patches/mark.py)


def pack_reloaded_experts(method: type[UnquantizedFusedMoEMethod]) -> None:
    """Have vLLM pack experts for its CPU kernel after every load of weights; 0.32.0 and 0.33.0 do so
    after the first alone.

    Without it the kernel takes the unpacked weights of an update for packed ones, and log-probs are
    silently wrong. method: its ``_setup_kernel`` is replaced. Upstream:
    ``vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py``. Delete when:
    ``_setup_kernel`` calls ``fused_experts.process_weights_after_loading`` after an update too.
    """
    original = method._setup_kernel
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def setup_and_pack(
        self: UnquantizedFusedMoEMethod,
        layer: torch.nn.Module,
        w13: torch.Tensor,
        w2: torch.Tensor,
    ) -> None:
        is_update = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    setattr(setup_and_pack, _MARK, original)
    method._setup_kernel = setup_and_pack


def undo_dropped_draws(runner: type[GPUModelRunner]) -> None:
    """Have vLLM undo, on a CPU too, the draws that it drops; 0.32.0 and 0.33.0 end there with an error.

    vLLM draws a token for every request of a step, drops it where the prompt is computed in parts
    and is not complete, and sets the request's generator back by its offset, which generators on a
    CPU do not have. Here they are set back by their states. runner: its ``_sample`` and
    ``_bookkeeping_sync`` are replaced. Upstream:
    ``vllm/v1/worker/gpu_model_runner.py``. Delete when: ``_bookkeeping_sync`` does not call
    ``get_offset`` on a CPU.
    """
    sample = runner._sample
    bookkeep = runner._bookkeeping_sync
    if hasattr(sample, _MARK):
        return

    @functools.wraps(sample)
    def sample_and_undo(self: GPUModelRunner, *args: object, **kwargs: object) -> object:
        dropped = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        generators = [
            self.input_batch.generators[i] for i in dropped if i in self.input_batch.generators
        ]
        states = [generator.get_state() for generator in generators]
        output = sample(self, *args, **kwargs)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return output

    @functools.wraps(bookkeep)
    def bookkeep_without_generators(
        self: GPUModelRunner, *args: object, **kwargs: object
    ) -> object:
        generators = self.input_batch.generators
        self.input_batch.generators = {}
        try:
            return bookkeep(self, *args, **kwargs)
        finally:
            self.input_batch.generators = generators

    setattr(sample_and_undo, _MARK, sample)
    runner._sample = sample_and_undo
    runner._bookkeeping_sync = bookkeep_without_generators


class WeightReceiver:
    """Methods of vLLM's worker."""

    rank: int
    vllm_config: VllmConfig
    model_config: ModelConfig
    model_runner: GPUModelRunner
    reload_weights: Callable[..., None]

    def __new__(cls, *args: object, **kwargs: object) -> WeightReceiver:
        """Patch vLLM where the worker runs on a CPU, before it loads a model."""
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
            UnquantizedFusedMoEMethod,
        )
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            from vllm.v1.worker.gpu_model_runner import GPUModelRunner

            pack_reloaded_experts(UnquantizedFusedMoEMethod)
            undo_dropped_draws(GPUModelRunner)
        return super().__new__(cls)

    def receive_weights(self, requests: str) -> None:
        """Load what the sources send. requests: JSON, a list of the receiver's requests, one for
        each rank.

        vLLM packs weights for its kernels once a layer has them all, so the layers are opened for
        loading before the first bucket and closed after the last. The receiver reports an error to
        the sources.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            keep_unfinished_layers(model)
            initialize_layerwise_reload(model)
            if megatron_gspo_receiver.receive(model, json.loads(requests)[self.rank]):
                keep_unfinished_layers(model)
            else:
                finalize_layerwise_reload(model, self.model_config)

    def receive_checkpoint(self, path: str) -> None:
        """Load a Hugging Face checkpoint."""
        model = self.model_runner.get_model()
        keep_unfinished_layers(model)
        try:
            self.reload_weights(weights_path=path)
        except BaseException:
            keep_unfinished_layers(model)
            raise


def keep_unfinished_layers(model: torch.nn.Module) -> None:
    """Give the layers that a failed load left open their weights of before, and drop what it loaded
    for them.

    vLLM would count that towards the next load, and close layers with parts of it uninitialised.
    """
    from vllm.model_executor.model_loader.reload.layerwise import (
        _place_kernel_tensors,
        get_layerwise_info,
    )

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
