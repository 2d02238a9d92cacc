"""Gradients that a backward pass adds to Megatron's buffers itself.

Megatron's DistributedDataParallel gives each parameter a ``main_grad``, which is a view of a buffer.
A hook of each parameter adds the gradient that autograd hands it: one more kernel, and ten bytes an
element in bfloat16. A backward pass that has added to ``main_grad`` sets
``grad_added_to_main_grad``, and the hook adds nothing (Megatron's
``gradient_accumulation_fusion``). Every use of such a weight in a forward pass must do the same.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def main_gradient(weight: Tensor) -> Tensor | None:
    """What a backward pass may add the gradient of ``weight`` to; None where autograd gets it.

    Megatron-FSDP makes such a tensor for each backward pass, which this does not take part in.
    """
    if not hasattr(weight, "grad_added_to_main_grad") or hasattr(weight, "__fsdp_param__"):
        return None
    return getattr(weight, "main_grad", None)


def main_gradients(weights: Sequence[Tensor]) -> list[Tensor] | None:
    """The main gradients of all ``weights``; None where one of them has none, or is there twice."""
    totals = {id(weight): main_gradient(weight) for weight in weights}
    present = [total for total in totals.values() if total is not None]
    return present if len(present) == len(weights) else None


def placeholder(weight: Tensor) -> Tensor | None:
    """Mark the gradient of ``weight`` as added; returns what autograd gets in its place.

    With overlapped reductions the hook wants a gradient, which it does not read. It gets the weight
    itself, which takes no memory. Where the embedding and the head share their weight
    (``zero_out_wgrad``), the hook also adds what it gets, and gets it from the embedding alone.
    """
    setattr(weight, "grad_added_to_main_grad", True)  # noqa: B010
    return None if getattr(weight, "zero_out_wgrad", False) else weight.detach()


def add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool = False) -> None:
    """total += a @ b, summed in total's dtype. ``first``: total is overwritten."""
    if b.dtype == total.dtype:
        total.addmm_(a, b, beta=0 if first else 1)
    elif first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
