"""Errors relative to the size of what was expected, and their comparison with tolerances."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor

MEASURED = "error / tolerance"  # the property of a test that holds its closest comparison


def check(
    record_property: Callable[[str, object], None], errors: Mapping[str, float], tolerance: float
) -> None:
    """Every error is below the tolerance.

    The largest ratio is recorded, for the summary of the run.
    """
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    record_property(
        MEASURED,
        f"{errors[worst] / tolerance:.2f} ({worst}: {errors[worst]:.1e} of {tolerance:.1e})",
    )
    wrong = {name: error for name, error in errors.items() if not error < tolerance}
    assert not wrong, f"tolerance {tolerance:.1e}: {wrong}"


def relative(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of ``expected``; computed in float64."""
    exact = expected.detach().double().cpu()
    return float((actual.detach().double().cpu() - exact).norm() / exact.norm())


def relative_to_spread(actual: Tensor, expected: Tensor) -> float:
    """Of log-probs and entropies: root mean square of the difference over the standard deviation of
    ``expected``.

    A relative error of the hidden states is one of the logits around their mean, which has no
    effect.
    """
    exact = expected.detach().double().cpu()
    return float((actual.detach().double().cpu() - exact).square().mean().sqrt() / exact.std())
