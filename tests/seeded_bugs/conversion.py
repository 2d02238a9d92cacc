"""Bugs of conversion: names, rows, experts and weights in few bits."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

CONVERSION = (
    SeededBug(
        name="gate and up projection exchanged",
        file="megatron_gspo/models/mapping_rules.py",
        before="torch.cat(list(parts), dim=0)",
        after="torch.cat(list(parts)[::-1], dim=0)",
        test="tests/models/test_mapping_rules.py::test_gate_lies_above_up",
    ),
    SeededBug(
        name="query, key and value laid one behind the other",
        file="megatron_gspo/models/mapping_rules.py",
        before="torch.cat(blocks, dim=1).reshape(-1, *query.shape[1:])",
        after="torch.cat([query, key, value], dim=0)",
        test="tests/models/test_mapping_rules.py::test_qkv_rows_lie_group_by_group",
    ),
    SeededBug(
        name="parameter without a rule dropped",
        file="megatron_gspo/mcore/hf_weights.py",
        before="raise ValueError(f'no rule of family",
        after="continue; raise ValueError(f'no rule of family",
        test="tests/mcore/test_hf_weights.py::test_broken_checkpoints_name_the_tensor",
    ),
    SeededBug(
        name="checkpoint tensors that the model doesn't use are passed over",
        file="megatron_gspo/models/families.py",
        before="extra := sorted(names - expected)",
        after="extra := sorted(expected - expected)",
        test="tests/models/test_families.py::test_missing_and_extra_names_are_told",
    ),
    SeededBug(
        name="scales of 8-bit blocks from the beginning of the tensor for every slice",
        file="megatron_gspo/models/stored_formats.py",
        before="firsts = (region.along(0).start or 0, region.along(1).start or 0)",
        after="firsts = (0, 0)",
        test="tests/tools/convert/test_carried_tensors.py::test_weights_in_8_bits_are_read_as_their_dequantized_values",
    ),
    SeededBug(
        name="the two numbers of a byte of MXFP4 exchanged",
        file="megatron_gspo/models/mxfp4.py",
        before="blocks & 15, blocks >> 4",
        after="blocks >> 4, blocks & 15",
        test="tests/models/test_mxfp4.py::test_values_by_hand",
    ),
    SeededBug(
        name="the eight numbers of a word of INT4 reversed",
        file="megatron_gspo/models/packed_int4.py",
        before="torch.arange(0, PER_WORD * _BITS, _BITS, dtype=torch.int32)",
        after="torch.arange(28, -1, -_BITS, dtype=torch.int32)",
        test="tests/models/test_packed_int4.py::test_values_by_hand",
    ),
    SeededBug(
        name="INT4 scales of a slice from the beginning of the tensor",
        file="megatron_gspo/models/stored_formats.py",
        before="files.stored(name + packed_int4.SCALE)[rows, first:last]",
        after="files.stored(name + packed_int4.SCALE)[rows, : last - first]",
        test="tests/models/test_packed_int4.py::test_a_slice_is_that_of_the_whole",
    ),
    SeededBug(
        name="layers of a Megatron checkpoint that stacks them in another order",
        file="megatron_gspo/mcore/checkpoint/stored_keys.py",
        before="Box((int(layer), *place.box.offsets)",
        after="Box((num_layers - 1 - int(layer), *place.box.offsets)",
        test="tests/mcore/checkpoint/test_initial_weights.py::test_keys_of_numbered_and_of_stacked_layers_are_found",
    ),
    SeededBug(
        name="experts of a stack in the wrong place",
        file="megatron_gspo/models/stacked_experts.py",
        before="stack[expert].copy_(tensor)",
        after="stack[len(filled)].copy_(tensor)",
        test="tests/models/test_stacked_experts.py::test_slices_in_any_order_become_whole_tensors",
    ),
    SeededBug(
        name="scales of blocks transposed",
        file="megatron_gspo/models/quantization/formats.py",
        before="values[:rows, :columns].contiguous(), scales",
        after="values[:rows, :columns].contiguous(), scales.t().contiguous()",
        test="tests/models/quantization/test_formats.py::test_blocks_are_those_of_transformers",
    ),
    SeededBug(
        name="a module in neither list stays as it is",
        file="megatron_gspo/models/quantization/module_list.py",
        before="_check_complete(known, chosen | kept, modules)",
        after="pass",
        test="tests/models/quantization/test_module_list.py::test_a_fault_names_list_entry_and_fix",
    ),
    SeededBug(
        name="experts in one tensor: a rank's rows cut through gate and up as one",
        file="megatron_gspo/models/rule_tables.py",
        before=", blocks=lambda shape: (shape.moe_ffn_hidden_size,) * 2",
        after="",
        test="tests/equivalence/test_layouts.py::test_family[qwen35_moe-tp2-pp1-cp2-dp1-ep1-etp2]",
    ),
    SeededBug(
        name="language model in a part: its layers without their prefix",
        file="megatron_gspo/models/with_images.py",
        before="prefix=_renamed(rule.prefix, starts)",
        after="prefix=rule.prefix",
        test="tests/models/test_checkpoint_checks.py::test_sizes_are_those_that_transformers_writes",
    ),
)
