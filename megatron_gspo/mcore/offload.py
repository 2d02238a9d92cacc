"""Moves what a policy keeps on its device between steps to host memory, and back, bit for bit.

Memory is released by storage: a storage is resized to 0 bytes and later back, so that parameters,
their views into Megatron's buffers, main parameters and Adam's moments stay the objects that they
are. Gradients are not copied: the next forward-backward pass zeroes them. On a CPU the same code
copies to other host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from megatron_gspo.mcore.policy_tensors import gradients, optimizer_states, weights
from megatron_gspo.mcore.protocols import MegatronOptimizer

PAGE = 4096  # bytes
_BLOCK = 1 << 26  # bytes; torch rounds pinned allocations up to a power of two


class HostBlocks:
    """Host memory in blocks of one size that begin with a page, allocated once and used again.
    Pinned if there is CUDA."""

    def __init__(self, block_bytes: int = _BLOCK) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[Tensor] = []
        self._used = 0  # bytes

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return len(self._blocks) * self._block_bytes

    def allocate(self, size: int) -> list[Tensor]:
        """Views of the next `size` bytes: [n] uint8 each."""
        pieces = []
        while size:
            block, start = divmod(self._used, self._block_bytes)
            if block == len(self._blocks):
                self._blocks.append(_allocate(self._block_bytes))
            piece = self._blocks[block][start : start + size]
            self._used += piece.numel()
            size -= piece.numel()
            pieces.append(piece)
        return pieces

    def used(self) -> list[Tensor]:
        """What was allocated, block by block: [n] uint8 each."""
        size = self._block_bytes
        return [
            block[: self._used - at * size]
            for at, block in enumerate(self._blocks)
            if at * size < self._used
        ]

    def reset(self) -> None:
        """All of it is free again."""
        self._used = 0


class DeviceMemory:
    """The device memory of some tensors. While it is released the tensors must not be used."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, keeps: bool) -> None:
        """tensors: those of now, on one device.

        keeps: whether `restore` brings their values back, or zeros.
        """
        self._tensors = tensors
        self._keeps = keeps
        self._host = HostBlocks()
        self._moved: list[tuple[Tensor, list[Tensor]]] = []
        self.released = False

    def release(self) -> None:
        """Copy to host memory, and free. Does nothing if that is done."""
        if self.released:
            return
        self.released = True
        for whole in whole_storages(self._tensors()):
            pieces = self._host.allocate(whole.numel()) if self._keeps else []
            for piece, there in zip(pieces, _split(whole, pieces), strict=True):
                piece.copy_(there, non_blocking=True)
            self._moved.append((whole, pieces))
        _synchronize()
        for whole, _ in self._moved:
            whole.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Undo `release`, at new addresses. Does nothing if nothing is released."""
        for whole, pieces in self._moved:
            whole.untyped_storage().resize_(whole.numel())
            if not self._keeps:
                whole.zero_()
            for piece, there in zip(pieces, _split(whole, pieces), strict=True):
                there.copy_(piece, non_blocking=True)
        self._moved.clear()
        self._host.reset()
        self.released = False


class PolicyMemory:
    """What a policy holds on its device between steps: weights, gradients and optimizer state.

    The passes of `mcore/train_step.py`, the weight export and checkpoints take back what they need.
    make_room: called before gradients and optimizer state are restored, to free what an engine
    holds on the same device.
    """

    def __init__(
        self, chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer | None
    ) -> None:
        """chunks: of the model, wrapped or not."""
        self.make_room: Callable[[], None] = _nothing
        self._optimizer = optimizer
        self._weights = DeviceMemory(lambda: weights(chunks), keeps=True)
        self._gradients = DeviceMemory(lambda: gradients(chunks), keeps=False)
        self._states = DeviceMemory(lambda: optimizer_states(chunks, optimizer), keeps=True)

    @property
    def released(self) -> bool:
        """Whether any of it is released."""
        return self._weights.released or self._states.released

    def release(self, *, keep_weights: bool = False) -> None:
        """Move it to host memory; does nothing for what is released already. Gradients are
        dropped.
        """
        if self._optimizer is not None:
            self._optimizer.zero_grad()  # main parameters may have gradients of their own
        for memory in (self._gradients, self._states, *(() if keep_weights else (self._weights,))):
            memory.release()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # other processes can have it

    def restore(self) -> None:
        """Take everything back. Gradients are zero."""
        if self._states.released:
            self.make_room()
        for memory in (self._weights, self._states, self._gradients):
            memory.restore()

    def restore_weights(self) -> None:
        """Take the weights back, for a forward pass or an export."""
        self._weights.restore()


def _allocate(size: int) -> Tensor:
    """[size] uint8 from the beginning of a page on."""
    pinned = torch.cuda.is_available()
    block = torch.empty(
        size if pinned else size + PAGE, dtype=torch.uint8, device="cpu", pin_memory=pinned
    )
    start = -block.data_ptr() % PAGE
    return block[start : start + size]


def whole_storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The storages of some tensors, each once, in their order, as [bytes] uint8; empty ones
    left out.
    """
    storages = {tensor.untyped_storage()._cdata: tensor.detach() for tensor in tensors}
    with torch.no_grad():
        return [
            tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            for tensor in storages.values()
            if tensor.untyped_storage().nbytes()
        ]


def _split(whole: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
    """A storage's bytes in pieces of the same sizes."""
    return list(whole.split([piece.numel() for piece in pieces])) if pieces else []


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _nothing() -> None:
    """The device is the trainer's alone."""
