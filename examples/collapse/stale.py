"""Stale responses from the embedded engine: it keeps its weights for four steps.

So its responses are up to three steps old, as those of servers that generate while the trainer
works. Evaluate at multiples of four steps, where its weights are the policy's.

callbacks: [examples/collapse/stale.py:StaleResponses]
"""

from __future__ import annotations

from megatron_gspo.loop.callbacks import Callback
from megatron_gspo.loop.setup import Components
from megatron_gspo.rollout.group_source import Weights

STEPS = 4


class StaleResponses(Callback):
    """Withholds the weights from the engine, but for those of every fourth step."""

    def start(self, run: Components, step: int) -> None:
        """See `Callback.start`."""
        send = run.groups.update_weights

        def send_some(weights: Weights, *, version: int) -> None:
            if version % STEPS == 0:
                send(weights, version=version)

        run.groups.update_weights = send_some  # type: ignore[method-assign]
