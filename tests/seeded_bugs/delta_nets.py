"""Bugs of gated delta nets, gated attention and zero-centred norms."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

RULE, LAYER = "megatron_gspo/mcore/gated_delta_net/delta_rule.py", "megatron_gspo/mcore/gated_delta_net/layer.py"
LAYOUT, TABLES = "megatron_gspo/mcore/gated_delta_net/chunk_layout.py", "megatron_gspo/models/qwen_next.py"
FOLDER = "tests/mcore/gated_delta_net/"
RECURRENCE = (FOLDER + "test_delta_rule.py::test_chunks_equal_the_recurrence",)
PLACES = (FOLDER + "test_chunk_layout.py::test_layout_equals_a_loop_over_tokens",)
MODULE = (FOLDER + "test_layer.py::test_layer_equals_the_recurrence",)
NORMS, MIXERS = "megatron_gspo/mcore/norms.py", "megatron_gspo/mcore/mixers.py"
ROWS = ("tests/models/test_qwen_next.py::test_rows_lie_head_by_head",)
BACK = ("tests/models/test_rule_tables.py::test_every_rule_gives_back_what_it_was_given",)
CENTRED = "tests/mcore/test_norms.py::test_a_"

DELTA_NETS = (
    SeededBug(
        "delta rule: the state of a chunk without its decay", "design", RULE,
        "torch.mul(states[going], decay[going], out=states[then])", "states[then] = states[going]", RECURRENCE,
    ),
    SeededBug(
        "delta rule: new values corrected by the state with the wrong sign", "design", RULE,
        "states[now], alpha=-1, out=new[now])", "states[now], alpha=1, out=new[now])", RECURRENCE,
    ),
    SeededBug(
        "delta rule: no gradient of the decay from chunk to chunk", "design", RULE,
        "grad_decay = torch.linalg.vecdot(states.flatten(1), after.flatten(1)).view(decay.shape)",
        "grad_decay = torch.zeros_like(decay)", RECURRENCE,
    ),
    SeededBug(
        "delta rule: a sequence goes on with the state of another", "several trainers", RULE,
        "going = slice(start, start + following)\n            torch.mul(",
        "going = slice(start + count - following, start + count)\n            torch.mul(", RECURRENCE,
    ),
    SeededBug(
        "delta net: the convolution reads beyond the beginning of a sequence", "several trainers", LAYOUT,
        "x.index_select(0, layout.wide_rows).index_fill_(0, layout.absent, 0.0)",
        "x.index_select(0, layout.wide_rows)", MODULE,
    ),
    SeededBug(
        "delta net: a chunk's convolution without the tokens before it", "design", LAYOUT,
        "copied = (offset >= size - before) & (step + 1 < chunks[sequence])",
        "copied = (offset >= size) & (step + 1 < chunks[sequence])", PLACES,
    ),
    SeededBug(
        "delta net: keys that are not normalized", "design", LAYER,
        "_unit(key), value, gate", "key, value, gate", MODULE,
    ),
    SeededBug(
        "delta net: the bias of a step added after the softplus", "design", LAYER,
        "F.softplus(step.flatten(2).to(dtype) + dt_bias.to(dtype))",
        "(F.softplus(step.flatten(2).to(dtype)) + dt_bias.to(dtype))", MODULE,
    ),
    SeededBug(
        "delta net: the gate is in the norm", "design", LAYER,
        "(rms_norm(x.to(dtype), weight.to(dtype), eps) * F.silu(gate.to(dtype)))",
        "rms_norm(x.to(dtype) * F.silu(gate.to(dtype)), weight.to(dtype), eps)", MODULE,
    ),
    SeededBug(
        "delta net: every context-parallel rank with the first heads' filters", "design", LAYER,
        "parameter.chunk(self.cp_group.size())[self.cp_group.rank()]", "parameter.chunk(self.cp_group.size())[0]",
        MODULE,
    ),
    SeededBug(
        "delta net: the norm's gradient of one tensor-parallel rank's heads", "design", LAYER,
        "self.out_norm.weight.sequence_parallel = config.sequence_parallel",
        "self.out_norm.weight.sequence_parallel = False", MODULE,
    ),
    SeededBug(
        "gated attention: queries and gates exchanged", "several converters", TABLES,
        "grouped((query, gate, key, value), key", "grouped((gate, query, key, value), key", ROWS,
    ),
    SeededBug(
        "gated attention: the gate left out", "one trainer", MIXERS,
        "attention_output_gate=shape.attention_gate", "attention_output_gate=False",
        ("tests/mcore/test_mixers.py::test_a_gate_of_attention",),
    ),
    SeededBug(
        "gated attention: all queries read as above all gates", "several converters", TABLES,
        "query, gate = ungrouped(both, (shape.head_dim, shape.head_dim))", "query, gate = both.chunk(2)", ROWS,
    ),
    SeededBug(
        "gated attention: rows of all groups in four blocks", "design", TABLES,
        "return grouped((query, gate, key, value), key.shape[0] // shape.head_dim)",
        "return torch.cat((query, gate, key, value))", ROWS,
    ),
    SeededBug(
        "gated attention: all queries exported above all gates", "several converters", TABLES,
        "return [grouped((query, gate), query.shape[0] // shape.head_dim), key, value]",
        "return [torch.cat((query, gate)), key, value]", BACK,
    ),
    SeededBug(
        "a zero-centred norm multiplies by its weight", "several converters", NORMS,
        "1.0 + self.weight.to(dtype)", "self.weight.to(dtype)",
        (CENTRED + "zero_centred_norm_multiplies_by_one_more_than_its_weight",),
    ),
    SeededBug(
        "a zero-centred norm of a new model begins at one", "design", NORMS,
        "torch.nn.init.zeros_(self.weight)", "pass",
        (CENTRED + "zero_centred_norm_multiplies_by_one_more_than_its_weight",),
    ),
    SeededBug(
        "one more than a zero-centred norm's weight in bfloat16", "one engine", NORMS,
        "1.0 + self.weight.to(dtype)", "(1.0 + self.weight).to(dtype)",
        (CENTRED + "small_weight_of_a_zero_centred_norm_is_not_rounded_off",),
    ),
    SeededBug(
        "zero-centred norms taken as plain ones", "several trainers", TABLES,
        "zero_centred_norms=True", "zero_centred_norms=False",
        ("tests/models/test_qwen_next.py::test_facts_are_read_from_the_config",),
    ),
    SeededBug(
        "the norm of a delta net's heads taken as zero-centred", "several converters", LAYER,
        "rms_norm(x.to(dtype), weight.to(dtype), eps)", "rms_norm(x.to(dtype), 1 + weight.to(dtype), eps)", MODULE,
    ),
)  # fmt: skip
