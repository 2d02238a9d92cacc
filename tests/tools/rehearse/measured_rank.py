"""The rehearsal's accounting of a real step: real tensors on the CPU, real processes and
collectives.

Nothing is fake but the router's choice, which is the rehearsal's, so that both move the same
tokens. Host and device are one here. A tensor counts as the device's if it is made for a device
that is named, or of the device's tensors, or by a copy of a host tensor that doesn't block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron_gspo.config import Config
from megatron_gspo.tools.rehearse.known_values import tensors_in
from megatron_gspo.tools.rehearse.recorder import Recorder
from megatron_gspo.tools.rehearse.records import RankRecord
from megatron_gspo.tools.rehearse.routing import expert_ids

aten = torch.ops.aten
_FACTORIES = ("arange", "empty", "empty_strided", "full", "ones", "tensor", "zeros")


class MeasuredRank(Recorder):
    """Runs every operation, and records it."""

    def __init__(self, *, expert_parallel: int = 1) -> None:
        super().__init__(expert_parallel=expert_parallel)
        self.collectives.gpu_only = False
        self._names_device = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.memory.index += 1
        if func.namespace == "c10d":
            name, _, received, *_ = self.collectives.record(func, args, kwargs)
            return (
                func(*args, **kwargs)
                if name in ("send", "recv")
                else _on_copies(func, args, kwargs, received)
            )
        inputs = tensors_in((*args, *kwargs.values()))
        out = func(*args, **kwargs)
        if func is aten.topk.default and args[0].dim() == 2:
            tokens, experts = args[0].shape
            ids = expert_ids(
                tokens,
                experts,
                args[1],
                expert_parallel=self.expert_parallel,
                imbalance=self.imbalance,
            )
            out = args[0].gather(1, ids), ids
        self.flops.count(func, args, kwargs, out)
        if (
            self.memory.phase == "build"
            or self._names_device
            or any(map(self.is_on_device, inputs))
        ):
            for leaf in tensors_in((out,)):
                self.memory.add(leaf, str(func))
        return out

    @contextlib.contextmanager
    def naming_device(self, value: bool) -> Iterator[None]:
        before = self._names_device
        self._names_device = value
        try:
            yield
        finally:
            self._names_device = before

    def is_on_device(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.memory.live


def _on_copies(func: Any, args: Any, kwargs: dict[str, Any], received: list[Tensor]) -> Any:
    """A collective whose tensors its threads don't keep alive for a moment longer."""
    copies = {id(leaf): leaf.clone() for leaf in tensors_in((*args, *kwargs.values()))}

    def copied(value: Any) -> Any:
        return copies[id(value)] if isinstance(value, Tensor) else value

    out = func(*tree_map(copied, args), **tree_map(copied, kwargs))
    work = out[1] if isinstance(out, tuple) else out
    torch.distributed.Work.unbox(work).wait()
    for tensor in received:
        tensor.copy_(copies[id(tensor)])
    return (args[0], work) if isinstance(out, tuple) else out


@contextlib.contextmanager
def _named_devices(recorder: MeasuredRank) -> Iterator[None]:
    """Marks for the recorder which factories name a device, and copies for non-blocking
    transfers.
    """

    def naming(factory: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Tensor:
            with recorder.naming_device(kwargs.get("device") is not None):
                return factory(*args, **kwargs)

        return make

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not kwargs.get("non_blocking") or recorder.is_on_device(tensor):
            return original(tensor, *args, **kwargs)
        with recorder.naming_device(True), recorder.phase(recorder.host.phase, "inputs"):
            return tensor.clone()

    original = Tensor.to
    factories = {name: naming(getattr(torch, name)) for name in _FACTORIES}
    with mock.patch.multiple(torch, **factories), mock.patch.object(Tensor, "to", to):
        yield


def composed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of operations that a CPU and a GPU share, since their kernels save other
    tensors.
    """
    scores = query @ key.transpose(-1, -2) * scale
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ value


@contextlib.contextmanager
def shared_operations() -> Iterator[None]:
    """Within the context there are no kernels that only a CPU or only a GPU has."""

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

    with (
        mock.patch("megatron_gspo.mcore.norms.rms_norm", rms_norm),
        mock.patch.object(F, "scaled_dot_product_attention", composed_attention),
        # Megatron's embedding, which a GPU without row kernels has.
        mock.patch("megatron_gspo.mcore.embedding._adds_rows", lambda weight: False),
    ):
        yield


def measured_rank(rank: int, world: int, config: Config) -> RankRecord:
    """The record of one of the processes of `run_distributed`."""
    from megatron_gspo.tools.rehearse.rehearse_rank import play_rank

    recorder = MeasuredRank(expert_parallel=config.parallel.expert_model_parallel_size)
    with shared_operations(), _named_devices(recorder):
        return play_rank(config, rank, world, recorder)
