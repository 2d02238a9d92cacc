"""Bugs of attention with sinks and windows, and of experts with biases and a clamped unit (gpt-oss)."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

ATTENTION, SINKS = "megatron_gspo/mcore/attention.py", "megatron_gspo/mcore/sinks.py"
OPERATORS, UNITS = "megatron_gspo/mcore/operators.py", "megatron_gspo/mcore/gated_units.py"
EXPERT_GRADIENTS = "patches/expert_gradients.py"
ALONE = ("tests/mcore/test_attention.py::test_equals_attention_of_each_sequence_alone",)
KERNEL = ("tests/mcore/test_sinks.py::test_a_kernels_backward_gives_the_gradients_with_sinks",)
EXPERTS = ("tests/mcore/test_operators.py::test_experts",)
UNIT = ("tests/mcore/test_gated_units.py::test_products_and_gradients",)
FAMILY = "tests/equivalence/test_layouts.py::test_family[gpt_oss-"
ETP2 = (FAMILY + "tp1-pp1-cp1-dp2-ep1-etp2]",)
EP2 = (FAMILY + "tp2-pp2-cp1-dp1-ep2-etp1]",)
_SCALED = "out = (out * (lse - total).exp().t()[..., None]).to(out.dtype)\n"
_SAVED = (
    "        ctx.kernel, ctx.state = kernel, state\n"
    "        ctx.save_for_backward(query, key, value, sinks, out, total)"
)

SINKS_AND_WINDOWS = (
    SeededBug(
        "sinks left out of the softmax", "several trainers", ATTENTION,
        "            key, value, mask = with_sink_key(key, value, mask)", "            pass", ALONE,
    ),
    SeededBug(
        "sinks not divided by the scale that scores are multiplied by", "design", ATTENTION,
        "self.sinks / self.softmax_scale", "self.sinks * 1.0", ALONE,
    ),
    SeededBug(
        "a window of one key too many in padded batches", "several trainers", ATTENTION,
        "mask &= columns > last - self.window", "mask &= columns >= last - self.window", ALONE,
    ),
    SeededBug(
        "a window of one key too many in the kernel", "one trainer", ATTENTION,
        "else self.window - 1, 0)", "else self.window, 0)", ALONE,
    ),
    SeededBug(
        "a block of queries lacks the first key of its window", "design", ATTENTION,
        "start = max(bucket.least + first - window + 1, 0)", "start = max(bucket.least + first - window + 2, 0)",
        ALONE,
    ),
    SeededBug(
        "the window ignored under context parallelism", "design", ATTENTION,
        "window = bucket.keys if self.window is None else min(self.window, bucket.keys)",
        "window = bucket.keys if self.window is None else min(self.window, bucket.queries)", ALONE,
    ),
    SeededBug(
        "the kernel's backward without the sink in its probabilities", "one trainer", SINKS,
        "ctx.save_for_backward(query, key, value, sinks, out, total)",
        "ctx.save_for_backward(query, key, value, sinks, out, lse)", KERNEL,
    ),
    SeededBug(
        "the kernel's backward with the output before the sink", "design", SINKS,
        _SCALED + _SAVED, _SAVED.lstrip() + "\n        " + _SCALED.rstrip(), KERNEL,
    ),
    SeededBug(
        "no gradient of the sinks", "one trainer", SINKS,
        "-(share * inner).sum(1).to(sinks.dtype)", "(share * inner).sum(1).to(sinks.dtype) * 0", KERNEL,
    ),
)  # fmt: skip

BIASED_EXPERTS = (
    SeededBug(
        "the gate clamped below", "one trainer", UNITS,
        "gate, linear = gate.clamp(max=self.limit), linear.clamp(-self.limit, self.limit)\n        return",
        "gate, linear = gate.clamp(min=-self.limit), linear.clamp(-self.limit, self.limit)\n        return", UNIT,
    ),
    SeededBug(
        "a gradient beyond the clamp", "design", UNITS, "out=grad_linear).mul_(inside)", "out=grad_linear)", UNIT,
    ),
    SeededBug("the offset of the linear half dropped", "one trainer", UNITS, ".mul_(linear.add_(self.offset))",
              ".mul_(linear)", UNIT),
    SeededBug(
        "the bias of linear_fc1 dropped", "several trainers", OPERATORS,
        "hidden += products.rows_of(weights.up_bias, len(x))", "pass", EXPERTS,
    ),
    SeededBug(
        "the bias of linear_fc2 without the routing weight", "design", OPERATORS,
        "_scaled(products.rows_of(weights.down_bias, len(x)), probs * weights.down_bias_share)",
        "products.rows_of(weights.down_bias, len(x)) * weights.down_bias_share", EXPERTS,
    ),
    SeededBug(
        "no gradient of a routing weight through a bias", "design", OPERATORS,
        "grad_probs += (grad * products.rows_of(weights.down_bias, len(x))).sum(1) * share", "pass", EXPERTS,
    ),
    SeededBug(
        "the bias of linear_fc2 added by every expert-tensor rank", "Megatron-Core, which refuses the layout",
        "megatron_gspo/mcore/layers.py", "down_bias_share=1 / self.tp_group.size()", "down_bias_share=1.0", ETP2,
    ),
    SeededBug(
        "an expert's bias counted by every expert-tensor rank in the gradient norm", "design", EXPERT_GRADIENTS,
        "bias.shared = not is_first", "bias.shared = False", ETP2,
    ),
    SeededBug(
        "gradients of different experts' biases added up over tensor ranks", "Megatron-Core", EXPERT_GRADIENTS,
        "bias.sequence_parallel = False", "pass", EP2,
    ),
    SeededBug(
        "gate and up exchanged where they alternate", "one trainer", "megatron_gspo/models/mapping_rules.py",
        "[parts[0][..., i::2].t() for i in range(2)]", "[parts[0][..., i::2].t() for i in (1, 0)]",
        ("tests/models/test_mapping_rules.py::test_alternating_outputs_become_gate_above_up",),
    ),
    SeededBug(
        "the two numbers of a byte of MXFP4 exchanged", "design", "megatron_gspo/models/mxfp4.py",
        "(blocks & 15, blocks >> 4)", "(blocks >> 4, blocks & 15)",
        ("tests/models/test_mxfp4.py::test_values_by_hand",),
    ),
    SeededBug(
        "powers of two of MXFP4 twice as large", "design", "megatron_gspo/models/mxfp4.py", "_BIAS = 127",
        "_BIAS = 126", ("tests/models/test_mxfp4.py::test_values_by_hand",),
    ),
    SeededBug(
        "signs of MXFP4 dropped", "design", "megatron_gspo/models/mxfp4.py", "*(-value for value in _VALUES)",
        "*_VALUES", ("tests/models/test_mxfp4.py::test_all_bytes_are_those_of_transformers",),
    ),
    SeededBug(
        "a stack sent before its last expert has come", "design", "megatron_gspo/models/stacked_experts.py",
        "if len(filled) == experts:", "if len(filled) == experts - 1:",
        ("tests/models/test_stacked_experts.py::test_slices_in_any_order_become_whole_tensors",),
    ),
    SeededBug(
        "experts of a stack in the wrong place", "design", "megatron_gspo/models/stacked_experts.py",
        "stack[expert].copy_(tensor)", "stack[len(filled)].copy_(tensor)",
        ("tests/models/test_stacked_experts.py::test_slices_in_any_order_become_whole_tensors",),
    ),
    SeededBug(
        "the window lost while decoding", "design", "megatron_gspo/rollout/embedded/decode.py",
        "torch.arange(columns, device=device) >= columns - window", "torch.arange(columns, device=device) >= 0",
        ("tests/rollout/embedded/test_embedded_engine.py::test_log_probs_equal_a_teacher_forced_pass",),
    ),
)  # fmt: skip
