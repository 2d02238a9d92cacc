"""The noise of examples/collapse, as a perturbation of the routers' choice."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_gspo.routing_replay.perturbation import KEY, Perturbation, PerturbedPass
from megatron_gspo.user_code import UserCodeError, load_function

COLLAPSE = Path(__file__).parents[2] / "examples" / "collapse"
NOISE = f"{COLLAPSE}/noise.py:noise"
STUDY = f"{COLLAPSE}/study.py:NoiseStudy"


def example_module(name: str, function: str) -> ModuleType:
    """The file `name`.py of the example, which has this function."""
    loaded = load_function(f"{COLLAPSE}/{name}.py:{function}", f"{KEY} =", UserCodeError)
    return sys.modules[loaded.__module__]


def noise_of(**options: Any) -> Perturbation:
    """The noise with these options."""
    return Perturbation(example_module("noise", "noise").noise, options, NOISE)


def noisy_pass(
    strength: float = 0.5, *, engine: str = "trainer", pass_seed: int = 1, **options: Any
) -> PerturbedPass:
    """The old policy's, or one of the rollout engine's."""
    phase = "old policy" if engine == "trainer" else ""
    return PerturbedPass(noise_of(strength=strength, **options), engine, pass_seed, phase=phase)


def noise_section(**options: Any) -> dict[str, Any]:
    """Keys of the section `routing`."""
    return {"perturbation": NOISE, "perturbation_options": options}
