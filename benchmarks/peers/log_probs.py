"""Log-probs and entropies from hidden states by the peers' own functions, all behind one signature.

Where a peer's function takes logits, the product with the output weight is made as that peer makes
it: in the inputs' dtype, of all tokens at once; in a tensor-parallel group hidden's gradient is
summed over it, as Megatron's `ColumnParallelLinear` does. Nothing of this project is imported here.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

Result = tuple[Tensor, Tensor | None]  # log-probs [T], entropy [T] if requested
# Hidden [T, h], weight [V / tp, h], labels [T], entropy?
Function = Callable[[Tensor, Tensor, Tensor, bool], Result]


@dataclass(frozen=True)
class Peer:
    """`load(group)` imports what is needed and returns the function; ImportError names what is
    missing.

    `parallel`: whether it runs in a tensor-parallel group too; `entropy`: whether it has one;
    `compiles`: whether its first call compiles.
    """

    name: str
    load: Callable[[ProcessGroup | None], Function]
    parallel: bool = False
    entropy: bool = True
    compiles: bool = False


class _SumGradient(torch.autograd.Function):
    """hidden as it is; its gradient summed over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def logits_of(hidden: Tensor, weight: Tensor, group: ProcessGroup | None) -> Tensor:
    """[T, V / tp] in the inputs' dtype."""
    return F.linear(hidden if group is None else _SumGradient.apply(hidden, group), weight)


# --- verl


def _verl(module: str) -> Any:
    """A module of verl; its Liger path (Triton) is turned off where Triton is absent, as it is
    without Liger.
    """
    kernels = types.ModuleType("liger_kernel.ops")
    kernels.LigerFusedLinearScaledCrossEntropyFunction = None  # type: ignore[attr-defined]
    absent = importlib.util.find_spec("triton") is None and "liger_kernel.ops" not in sys.modules
    if absent:
        sys.modules["liger_kernel.ops"] = kernels
    try:
        return importlib.import_module(f"verl.utils.{module}")
    finally:
        if absent:
            del sys.modules["liger_kernel.ops"]


def verl_megatron(group: ProcessGroup | None) -> Function:
    """`vocab_parallel_log_probs_from_logits` and `vocab_parallel_entropy`, on a clone as its
    engine calls them.
    """
    functions = _verl("megatron.tensor_parallel")

    def run(hidden: Tensor, weight: Tensor, labels: Tensor, entropy: bool) -> Result:
        logits = logits_of(hidden, weight, group)
        copy = logits.clone() if entropy else logits
        entropies = functions.vocab_parallel_entropy(logits) if entropy else None
        return functions.vocab_parallel_log_probs_from_logits(copy, labels), entropies

    return run


# --- AReaL, Liger, Megatron-Core


def areal(group: ProcessGroup | None) -> Function:
    """`gather_logprobs` and `gather_logprobs_entropy`. Its packages are entered without running
    their `__init__.py`, which import its servers and launchers."""
    if "areal" not in sys.modules:
        spec = importlib.util.find_spec("areal")
        if spec is None or spec.origin is None:
            raise ImportError("areal is not installed")
        for name in ("areal", "areal.infra", "areal.utils", "areal.utils.functional"):
            package = types.ModuleType(name)
            package.__path__ = [str(Path(spec.origin).parent.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = package
    functions = importlib.import_module("areal.utils.functional.vocab_parallel")

    def run(hidden: Tensor, weight: Tensor, labels: Tensor, entropy: bool) -> Result:
        logits = logits_of(hidden, weight, group)
        if entropy:
            return functions.gather_logprobs_entropy(logits, labels, tp_group=group)
        return functions.gather_logprobs(logits, labels, tp_group=group), None

    return run


def liger(_: ProcessGroup | None) -> Function:
    """`_ChunkedSelectiveLogProbFunction`, which its fused linear GRPO loss calls."""
    module = importlib.import_module("liger_kernel.chunked_loss.fused_linear_ppo")
    function = module._ChunkedSelectiveLogProbFunction
    size = module._SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE
    return lambda hidden, weight, labels, entropy: (
        function.apply(hidden, weight, labels, None, 1.0, size),
        None,
    )


def megatron(group: ProcessGroup | None) -> Function:
    """`vocab_parallel_cross_entropy`, which overwrites float32 logits."""
    module = importlib.import_module("megatron.core.tensor_parallel.cross_entropy")

    def run(hidden: Tensor, weight: Tensor, labels: Tensor, entropy: bool) -> Result:
        return -module.vocab_parallel_cross_entropy(logits_of(hidden, weight, group), labels), None

    return run


PEERS = (
    Peer("verl vocab_parallel", verl_megatron, parallel=True, compiles=True),
    Peer("AReaL gather_logprobs", areal, parallel=True, compiles=True),
    Peer("Liger chunked log-probs", liger, entropy=False),
    Peer("Megatron cross entropy", megatron, parallel=True, entropy=False),
)
