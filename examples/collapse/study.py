"""The study of perturbed routers as a callback: its metrics."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_gspo.loop.callbacks import AfterStep, Callback
from megatron_gspo.loop.evaluation import evaluate
from megatron_gspo.loop.setup import Components
from megatron_gspo.loop.timers import Timers
from megatron_gspo.user_code import UserCodeError


class NoiseStudy(Callback):
    """Logs `routing/noise_strength`, and `eval/accuracy_without_noise` with each evaluation after a
    step.
    """

    def __init__(self) -> None:
        self._run: Components | None = None

    def start(self, run: Components, step: int) -> None:
        """Keep the run, whose routers must have the noise."""
        if run.perturbation is None:
            raise UserCodeError(
                "callbacks: NoiseStudy needs routing.perturbation: examples/collapse/noise.py:noise"
            )
        self._run = run

    def after_step(self, step: int, metrics: Mapping[str, float]) -> AfterStep:
        """The strength, and the accuracy of clean routers where the step is evaluated."""
        run = self._run
        assert run is not None and run.perturbation is not None
        options = run.perturbation.options
        added = {"routing/noise_strength": float(options["strength"])}
        if "eval/accuracy" in metrics and options.get("engines", "both") != "trainer":
            assert run.eval_groups is not None
            with run.perturbation.off():
                clean = evaluate(
                    run.eval_groups, run.rewards, run.eval_prompts, run.config, Timers()
                )
            added["eval/accuracy_without_noise"] = clean["eval/accuracy"]
        return AfterStep(added)
