"""What a `torch.autograd.Function` finds in its ``ctx``, for which torch has no complete type."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class AutogradContext(Protocol):
    """Goes from a function's forward to its backward.

    A function that keeps values besides tensors names them in a subclass.
    """

    saved_tensors: tuple[Tensor, ...]
    """Those of `save_for_backward`, in its order."""

    needs_input_grad: tuple[bool, ...]
    """Which of the inputs get a gradient."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors until the backward."""

    def set_materialize_grads(self, value: bool) -> None:
        """Whether a missing gradient comes as zeros, and not as None."""
