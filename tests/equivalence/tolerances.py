"""How far a layout may be from the float64 truth, and why; the page of the documentation quotes both."""

from __future__ import annotations

TOLERANCES = {
    "log-prob": 1e-5,  # nats
    "entropy": 1e-5,  # nats
    "loss": 1e-5,  # relative, like all that follow
    "metric": 1e-5,
    "gradient": 1e-5,  # of the worst parameter
    "step metric": 1e-5,  # with grad_norm and lr
    "update": 5e-5,  # of the worst parameter, over three optimizer steps
    "replayed log-prob": 1e-6,  # nats, between the pass that recorded the routes and the one that replays them
    "router figure": 1e-5,  # entropy in nats, load as a share
    "route": 1e-9,  # tokens with another expert than they should have: none
}
OF_EXPERTS = ("replayed log-prob", "router figure", "route")

REASON = """
Megatron's side computes in float32. A rounding is off by up to 6e-8, and a log-prob or a gradient is the sum of
thousands of them through four layers: one process alone is off by the figures of the first column. A layout adds the
same terms in another order, no more than that, and the tolerance leaves a small factor. The weight change is a
difference of two float32 weights: a norm's weight of about 1 is rounded by 6e-8 at every step of at most 1e-2, which
makes 1e-5 of its change. Adam's `eps` is 2e-4 here, the size of a gradient's entries: with the usual 1e-8 the sign of
an entry of pure rounding noise would decide on a step of a whole learning rate.

Tests also check that nothing in the comparison hangs on rounding: no ratio within 2e-5 of a clip, no two experts
within 2e-5 of changing places, no parameter whose gradient is what is left of terms that cancel (each has at least
2 % of the typical norm: at 0.7 % one was off by 1.2e-5).
"""
