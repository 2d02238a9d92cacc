"""Bugs of Qwen3.5: separate projections, language models that are a part of a model with images, experts in one tensor
with gate above up."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

TABLES, RULES = "megatron_gspo/models/qwen35.py", "megatron_gspo/models/rule_tables.py"
FACTS = "megatron_gspo/models/model_shape.py"
TESTS = "tests/models/test_qwen35.py::"
ROWS = (TESTS + "test_rows_lie_head_by_head",)
OF_A_RANK = (TESTS + "test_a_rank_reads_its_rows_of_the_whole_projection",)

OF_QWEN35 = (
    SeededBug(
        "separate projections: steps and betas exchanged in Megatron's rows", "several converters", TABLES,
        "return grouped((query, key, value, b, a, z), heads)", "return grouped((query, key, value, a, b, z), heads)",
        ROWS,
    ),
    SeededBug(
        "separate projections: queries, keys and values taken as grouped by head", "several converters", TABLES,
        "return grouped((query, key, value, b, a, z), heads)",
        "return torch.cat((qkv, b, a, z))", ROWS,
    ),
    SeededBug(
        "separate projections: a rank's rows cut through queries, keys and values as one", "design", TABLES,
        "        blocks=convolved_blocks,\n", "", OF_A_RANK,
    ),
    SeededBug(
        "separate projections: steps read as betas", "several converters", TABLES,
        'for part in ("qkv", "z", "b", "a")', 'for part in ("qkv", "z", "a", "b")', OF_A_RANK,
    ),
    SeededBug(
        "experts in one tensor: a rank's rows cut through gate and up as one", "several converters", RULES,
        "        blocks=lambda shape: (shape.moe_ffn_hidden_size,) * 2,\n", "",
        (TESTS + "test_a_rank_reads_its_rows_of_gate_and_up",),
    ),
    SeededBug(
        "language model in a part: its layers without their prefix", "several converters", RULES,
        'prefix=rule.prefix.replace("model.", "model.language_model.", 1)', "prefix=rule.prefix",
        (TESTS + "test_names_of_the_two_kinds_of_files",),
    ),
    SeededBug(
        "language model in a part: the engine does not know its names", "design", TABLES,
        '_ALONE = (("model.language_model.", "model."),)', "_ALONE = ()",
        ("tests/rollout/embedded/test_weight_loading.py::"
         "test_a_language_model_that_is_alone_takes_the_names_that_it_has_as_a_part",),
    ),
    SeededBug(
        "language model in a part: the vision tower is no carried part", "several trainers", TABLES,
        'carried=(*found.carried, "model.visual."))', "carried=found.carried)",
        (TESTS + "test_vision_and_multi_token_prediction_are_carried",),
    ),
    SeededBug(
        "language model in a part: keys of the whole model before its own", "design", FACTS,
        '{**config, **with_defaults(model_type, inner | text, is_text_config=True), "model_type"',
        '{**with_defaults(model_type, inner | text, is_text_config=True), **config, "model_type"',
        ("tests/models/test_model_shape.py::test_keys_of_a_language_model_take_the_place_of_the_whole_models",),
    ),
    SeededBug(
        "dense layers of two kinds stored as if all had the same parameters", "design", "megatron_gspo/mcore/mixers.py",
        "return dict(hetereogenous_dist_checkpoint=True)", "return dict()",
        ("tests/mcore/test_mixers.py::test_gated_delta_net",),
    ),
    SeededBug(
        "decay rates rounded to the type of the other weights", "several trainers", TABLES,
        'keeps_float32=rule.megatron[0].endswith((".A_log", ".out_norm.weight"))', "keeps_float32=False",
        (TESTS + "test_decay_rates_and_the_norm_behind_them_are_kept_in_float32",),
    ),
)  # fmt: skip
