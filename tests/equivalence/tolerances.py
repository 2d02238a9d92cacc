"""How far a layout may be from the float64 truth, and why.

Megatron's side computes in float32: every rounding is off by up to 6e-8 of its value, and a log-prob or gradient is
the sum of thousands of them through four layers. One process alone is off by the figures of the first column
(worst of all parameters and metrics, both models, both ends of the range of megatron-core); layouts add the same terms
in another order and come to the second column. The tolerance is the next round figure, two to seven times that.

================  ===========  ===========  =========
error             one process  all layouts  tolerance
================  ===========  ===========  =========
================  ===========  ===========  =========

Errors of gradients and updates are norms of a parameter's difference relative to the norm of that parameter's own
truth; of losses and metrics relative to their own value; of log-probs and entropies absolute, in nats.
A defect is far from this: the smallest one that was tried (docs/equivalence.md) is off by more than 1e-3.

The update is the difference of two float32 weights after three steps of up to 1e-2: a norm's weight of about 1 is
rounded by 6e-8 at each step, which alone is 1e-5 of its update.
"""

from __future__ import annotations

TOLERANCES = {
    "log-prob": 1e-5,
    "entropy": 1e-5,
    "loss": 1e-5,
    "metric": 1e-5,
    "gradient": 1e-5,
    "step metric": 1e-5,
    "update": 1e-4,
}
