"""Bugs in counted parameters."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

PARAMETERS = "tools/plan/parameters.py"
COUNTS = "tests/tools/plan/test_parameters.py::"
OF_DELTA_NETS = (COUNTS + "test_published_sizes_of_gated_delta_nets",)

PLANS = (
    SeededBug(
        "plan: the filters of a gated delta net are of one token", "design", PARAMETERS,
        "sizes.convolved * sizes.kernel", "sizes.convolved", OF_DELTA_NETS,
    ),
    SeededBug(
        "plan: gated attention without the gate's rows", "design", PARAMETERS,
        "(1 + shape.attention_gate) * query", "query", OF_DELTA_NETS,
    ),
    SeededBug(
        "plan: a gate of shared experts that have none", "design", PARAMETERS,
        "hidden if shape.shared_expert_gate else 0", "hidden if shape.shared_expert_size else 0",
        (COUNTS + "test_megatron_has_as_many",),
    ),
)  # fmt: skip
