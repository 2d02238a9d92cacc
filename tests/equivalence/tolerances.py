"""Tolerances of the comparison with the float64 reference, and their reason.

Megatron computes in float32: one rounding is off by up to 6e-8, and a log-prob or gradient sums
thousands of them through four layers. A layout only changes the order of summation. A weight change
is a difference of two float32 weights, so rounding of a weight near 1 is 1e-5 of a change of 1e-2.
Adam's `eps` is 2e-4, the size of a gradient's entries: with 1e-8 the sign of an entry of rounding
noise would decide a whole step.

The passes that record and replay routes pack different micro-batches; their log-probs differ by at
most four of float32's steps of 4.8e-7 between 4 and 8 nats.

Tests check that the comparison does not depend on rounding: no ratio within 2e-5 of a clip, no two
experts' logits within 2e-5 of each other, and every gradient at least 2 % of the typical norm.
"""

from __future__ import annotations

TOLERANCES = {
    "log-prob": 1e-5,  # nats
    "entropy": 1e-5,  # nats
    "loss": 1e-5,  # relative, like all that follow
    "metric": 1e-5,
    "gradient": 1e-5,  # of the worst parameter
    "step metric": 1e-5,  # with grad_norm and lr
    "update": 5e-5,  # of the worst parameter, over three optimizer steps
    # Nats, between the pass that recorded the routes and the one that replays them.
    "replayed log-prob": 2e-6,
    "router figure": 1e-5,  # entropy in nats, load as a share
    "route": 1e-9,  # tokens with another expert than they should have: none
}
OF_LORA = {
    "base log-prob": 1e-5,  # nats; with the adapters off
    "frozen weight": 1e-9,  # values of the base that training has changed: none
}
OF_EXPERTS = ("replayed log-prob", "router figure", "route")
