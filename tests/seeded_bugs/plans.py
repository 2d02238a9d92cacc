"""Bugs in planned sizes of gated delta nets and of the layers beside them, and in a host's rates."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

PARAMETERS, SAVED = "tools/plan/parameters.py", "tools/plan/activations.py"
TALK, ENGINE = "tools/plan/communication.py", "tools/plan/engine_memory.py"
ORDER = ("tests/tools/plan/test_parameters.py::test_megatron_registers_the_same_tensors_in_the_same_order",)
BY_HAND = "tests/tools/plan/test_delta_nets.py::"
MEASURED, OF_RESULTS = "benchmarks/real_size_page.py", "tests/benchmarks/test_real_size_page.py::"

PLANS = (
    SeededBug(
        "plan: the filters of a gated delta net are of one token", "design", PARAMETERS,
        "heads * sizes.convolved * sizes.kernel", "heads * sizes.convolved",
        (BY_HAND + "test_parameters_of_a_layer_by_hand",),
    ),
    SeededBug(
        "plan: gated attention without the gate's rows", "design", PARAMETERS,
        "(1 + shape.attention_gate) * query", "query", (BY_HAND + "test_the_gate_of_attention_has_rows_of_its_own",),
    ),
    SeededBug(
        "plan: a gate of shared experts that have none", "design", PARAMETERS,
        "if shape.shared_expert_gate:", "if shape.shared_expert_size:", ORDER,
    ),
    SeededBug(
        "plan: whole shared experts on each tensor-parallel rank", "design", PARAMETERS,
        "width = shape.shared_expert_size // tp", "width = shape.shared_expert_size", ORDER,
    ),
    SeededBug(
        "plan: a shared expert takes tokens as they lie", "this project", TALK,
        "2 if is_moe and not z.shared else 4", "2 if is_moe else 4",
        (BY_HAND + "test_ranks_exchange_heads_for_tokens",),
    ),
    SeededBug(
        "plan: whole layers do not repeat the exchange of heads for tokens", "design", TALK,
        'return 2.0 + (setting.recompute == "full")', "return 2.0", (BY_HAND + "test_ranks_exchange_heads_for_tokens",),
    ),
    SeededBug(
        "plan: the delta rule is kept where it runs again", "design", SAVED,
        'keeps_rule=setting.recompute == "full"', 'keeps_rule=setting.recompute != "full"',
        (BY_HAND + "test_a_model_of_both_kinds_of_layers",),
    ),
    SeededBug(
        "plan: keys and values of gated delta nets in the engine", "design", ENGINE,
        'sum(mixer != "gated_delta_net" for mixer in shape.mixers)', "shape.num_layers",
        (BY_HAND + "test_only_attention_has_keys_and_values_in_an_engine",),
    ),
    SeededBug(
        "plan: a host's rate is of an older measurement", "this project", "tools/plan/assumptions.py",
        "receive_ns_id: float = _a(5.7", "receive_ns_id: float = _a(9.5",
        (OF_RESULTS + "test_the_plan_has_the_rates_of_the_newest_result",),
    ),
    SeededBug(
        "plan: the oldest result of a row counts", "design", MEASURED,
        'for file in folder.glob(f"20*-{name}.json"))', 'for file in folder.glob(f"20*-{name}.json"))[::-1]',
        (OF_RESULTS + "test_the_newest_row_counts_and_gets_what_was_before",),
    ),
)  # fmt: skip
