"""Bugs of weights in eight bits: their blocks and scales, the lists of modules, and the streams."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

FORMATS = "megatron_gspo/models/quantization/formats.py"
LIST, PLAN = "megatron_gspo/models/quantization/module_list.py", "megatron_gspo/models/quantization/plan.py"
ROOM = "tests/models/quantization/"
BLOCKS = (ROOM + "test_formats.py::test_blocks_are_those_of_transformers",)
ROWS = (ROOM + "test_formats.py::test_rows_by_hand",)
NAMES = (ROOM + "test_module_list.py::test_a_name_is_no_part_of_another",)
FAULTS = (ROOM + "test_module_list.py::test_a_fault_names_list_entry_and_fix",)
STREAM = (ROOM + "test_plan.py::test_listed_weights_leave_in_eight_bits_and_the_others_as_they_are",)
LOADED = (ROOM + "test_plan.py::test_transformers_loads_block_fp8",)

QUANTIZATION = (
    SeededBug(
        "scales of blocks transposed", "design", FORMATS,
        "    return values[:rows, :columns].contiguous(), scales\n",
        "    return values[:rows, :columns].contiguous(), scales.t().contiguous()\n", BLOCKS,
    ),
    SeededBug(
        "a block's scale stored inverted", "design", FORMATS,
        "    return factors, 1.0 / factors\n", "    return factors, factors\n", BLOCKS,
    ),
    SeededBug(
        "scales rounded to bfloat16", "design", FORMATS,
        "    return factors, 1.0 / factors\n", "    return factors, (1.0 / factors).bfloat16().float()\n", BLOCKS,
    ),
    SeededBug(
        "quantised in the weight's own type", "design", FORMATS,
        "    padded = pad(weight.float(), ", "    padded = pad(weight, ", BLOCKS,
    ),
    SeededBug(
        "the last block padded with the weight's edge", "design", FORMATS,
        "(0, -columns % BLOCK[1], 0, -rows % BLOCK[0]))", "(0, -columns % BLOCK[1], 0, -rows % BLOCK[0]), value=9.0)",
        BLOCKS,
    ),
    SeededBug(
        "integers truncated instead of rounded", "design", FORMATS,
        "(found / scales).round_()", "(found / scales).trunc_()", ROWS,
    ),
    SeededBug(
        "a float32 weight divided in place", "this project", FORMATS,
        "(found / scales).round_()", "found.div_(scales).round_()",
        (ROOM + "test_formats.py::test_the_weight_itself_stays_as_it_is",),
    ),
    SeededBug(
        "integers scaled to 128", "design", FORMATS, "largest / _INT8_MAX, 1.0)", "largest / 128, 1.0)", ROWS,
    ),
    SeededBug(
        "modules chosen by a part of their name", "verl#7519", LIST,
        "if pattern.fullmatch(module)]", "if pattern.search(module)]", NAMES,
    ),
    SeededBug(
        "a module in neither list stays as it is", "verl#7519", LIST,
        "    _check_complete(known, chosen | kept, modules)\n", "", FAULTS,
    ),
    SeededBug(
        "config.json is read again at each use of the plan", "this project", "megatron_gspo/config/schema.py",
        "    @cached_property\n", "    @property\n",
        ("tests/config/test_quantization_checks.py::test_config_json_is_read_once",),
    ),
    SeededBug(
        "a star matches several components", "design", LIST, 'r"[^.]+" if part', 'r".+" if part', NAMES,
    ),
    SeededBug(
        "the scale sent before its weight", "design", PLAN,
        "            yield name, values\n            yield name + self.format.scale, scales\n",
        "            yield name + self.format.scale, scales\n            yield name, values\n", STREAM,
    ),
    SeededBug(
        "kept experts not named in the config", "design", LIST,
        "dict.fromkeys(_experts_of(module) or module for module in modules)",
        "dict.fromkeys(module for module in modules if not _experts_of(module))", LOADED,
    ),
)  # fmt: skip
