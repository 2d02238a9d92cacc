"""A perturbation of the routers' choice (``routing.perturbation``): a function of the user's that
changes the logits by which experts are chosen, and those by which they are weighed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_gspo.config import RoutingConfig
from megatron_gspo.user_code import UserCodeError, call_for_trial, load_user_function

KEY = "routing.perturbation"


@dataclass(frozen=True)
class RoutedTokens:
    """Which tokens a router sees, int64 [t] each, on the device of its logits."""

    prompts: Tensor
    """`Sample.prompt_index`."""
    samples: Tensor
    """`Sample.sample_index`; -1 in a prompt that the rollout engine reads once for all samples."""
    positions: Tensor
    """In the sequence, from 0."""

    @classmethod
    def of(cls, sequences: Tensor, segments: Tensor, positions: Tensor) -> RoutedTokens:
        """The tokens of packed sequences.

        Args:
            sequences: int64 [n, 2], (prompt_index, sample_index) of each.
            segments: int64 [t], the sequence of each token.
            positions: int64 [t], in the sequence.
        """
        names = sequences[segments]
        return cls(names[:, 0], names[:, 1], positions)


@dataclass(frozen=True)
class RouterTerms:
    """What a perturbation reads: one router's logits in one pass, and whose they are.

    Layouts, packing and recomputation divide tokens otherwise, so what a function returns for a
    token may depend on nothing else.
    """

    logits: Tensor
    """[t, experts] of the live router, whose softmax is its distribution."""
    tokens: RoutedTokens
    layer: int
    """Of the router, from 0, among the model's layers with experts."""
    engine: str
    """`trainer`, or `rollout`, which is the embedded engine."""
    phase: str
    """Of the trainer: `old policy`, `reference policy` or `update N`."""
    seed: int
    """`seed` of the config; in the rollout engine, that of its draws, another in each step."""
    step: int
    """Of the run, from 0; 0 in the rollout engine."""


PerturbationFunction = Callable[..., "Tensor | tuple[Tensor, Tensor]"]


@dataclass
class Perturbation:
    """The function, and keyword arguments of every call, which a callback may change between
    passes.
    """

    function: PerturbationFunction
    options: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    _is_off: bool = field(init=False, default=False)

    @contextmanager
    def off(self) -> Iterator[None]:
        """The routers choose by their own logits in the meantime."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def __call__(self, terms: RouterTerms) -> tuple[Tensor, Tensor]:
        """The logits that experts are chosen by, and those that they are weighed by; `terms.logits`
        itself where they do not change.
        """
        if self._is_off:
            return terms.logits, terms.logits
        returned = self.function(terms, **self.options)
        chosen_by, weighed_by = (
            returned if isinstance(returned, tuple) else (returned, terms.logits)
        )
        for values in (chosen_by, weighed_by):
            if not isinstance(values, Tensor) or values.shape != terms.logits.shape:
                shown = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise UserCodeError(
                    f"{KEY} = {self.name!r}: returned {shown} for logits"
                    f" {list(terms.logits.shape)}; return logits of that shape, or a pair of them"
                )
        return chosen_by, weighed_by


@dataclass(frozen=True)
class PerturbedPass:
    """A perturbation in one pass of one engine; see `RouterTerms`."""

    perturbation: Perturbation
    engine: str
    seed: int
    step: int = 0
    phase: str = ""

    def __call__(self, logits: Tensor, layer: int, tokens: RoutedTokens) -> tuple[Tensor, Tensor]:
        """See `Perturbation`."""
        terms = RouterTerms(
            logits, tokens, layer, self.engine, phase=self.phase, seed=self.seed, step=self.step
        )
        return self.perturbation(terms)


def load_perturbation(section: RoutingConfig) -> Perturbation | None:
    """The section's perturbation, tried with three tokens; None without one.

    Raises UserCodeError where it can't be loaded, raises, or returns anything else than logits that
    depend on each token alone.
    """
    if section.perturbation is None:
        return None
    function = load_user_function(KEY, section.perturbation)
    perturbation = Perturbation(
        function, dict(section.perturbation_options), name=section.perturbation
    )
    arguments = ", ".join(["terms", *section.perturbation_options])
    call_for_trial(
        KEY, section.perturbation, f"({arguments}) of 3 tokens", lambda: _try(perturbation)
    )
    return perturbation


def _try(perturbation: Perturbation) -> None:
    logits = torch.linspace(-1, 1, 12).view(3, 4).sin()
    tokens = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0]])
    for engine, phase in (("trainer", "old policy"), ("rollout", "")):
        perturbed_pass = PerturbedPass(perturbation, engine, seed=1, phase=phase)
        of_all = perturbed_pass(logits, 0, RoutedTokens(*tokens))
        of_the_last = perturbed_pass(logits[1:], 0, RoutedTokens(*tokens[:, 1:]))
        for values, last_values in zip(of_all, of_the_last, strict=True):
            if not values.isfinite().all():
                raise _refusal(perturbation, "returned NaN or infinity: correct the formula")
            if not torch.equal(values[1:], last_values):
                raise _refusal(
                    perturbation,
                    "a token's logits depend on the other tokens or on the call: make random numbers"
                    " of terms.tokens, terms.seed, terms.step and terms.layer",
                )


def _refusal(perturbation: Perturbation, problem: str) -> UserCodeError:
    return UserCodeError(f"{KEY} = {perturbation.name!r}: {problem}")
