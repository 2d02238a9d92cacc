"""Weights that tests send to real servers, and updates that go wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron_gspo.weight_transport.disk_transport import DiskTransport
from tests.support.transformers_reference import load_reference


def changed_model(path: str, version: int) -> torch.nn.Module:
    """The model as an update leaves it, in float64: every version has other weights, rounded to
    float32 as they travel."""
    model = load_reference(path)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_((parameter * (1 + 0.05 * version * noise)).float())
    return model


class HarmedWeights:
    """Weights whose first transfer calls `harm` before the tensor `at`, which is in the middle of
    the tests' models.

    Iterated again for each further transfer, such as one to the servers that are left when a group
    broke.
    """

    def __init__(
        self,
        weights: Callable[[], Iterator[tuple[str, Tensor]]],
        harm: Callable[[], object],
        at: int = 60,
    ) -> None:
        self._weights = weights
        self._harm = harm
        self._at = at
        self._begun = self._read = 0  # transfers

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self._begun += 1
        is_first = self._begun == 1
        for number, pair in enumerate(self._weights()):
            if is_first and number == self._at:
                self._harm()
            yield pair
        self._read += 1

    @property
    def all_read(self) -> bool:
        """Whether every transfer was read to its end, as it must be where producing it is
        collective.
        """
        return self._begun == self._read > 0


class VanishingTransport(DiskTransport):
    """Its checkpoint is gone when the servers load it."""

    def publish(self, num_sources: int) -> None:
        super().publish(num_sources)
        shutil.rmtree(self.checkpoint)
