"""Bugs of latent attention, rotary embeddings, biased sigmoid routers and quantized or untrained tensors."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

LATENT, ATTENTION = "megatron_gspo/mcore/latent_attention.py", "megatron_gspo/mcore/attention.py"
READER, ROTARY = "megatron_gspo/models/config_reader.py", "megatron_gspo/models/rotary.py"
BIAS, MODEL = "megatron_gspo/mcore/expert_bias.py", "megatron_gspo/mcore/model.py"
FILES, TABLES = "megatron_gspo/models/hf_checkpoint.py", "megatron_gspo/models/rule_tables.py"
FORMATS = "megatron_gspo/models/quantization/formats.py"
HOOKS = "megatron_gspo/mcore/routing_replay/router_hooks.py"
MODULE = "tests/mcore/test_latent_attention.py::test_equals_transformers_module"
TENSOR = "tests/mcore/test_latent_attention.py::test_tensor_parallel_ranks_share_latents_and_the_rotated_key"
OF_BIAS = "tests/mcore/test_expert_bias.py::"
CHOICE = OF_BIAS + "test_it_takes_part_in_the_choice_and_not_in_the_weights"
KEPT = "router.expert_bias.data = router.expert_bias.data.float()"
FROZEN = OF_BIAS + "test_it_is_frozen_and_keeps_its_bits_in_training_checkpoints_and_streams"
CONVERT = "tests/tools/convert/test_carried_tensors.py::"
EIGHT_BITS = CONVERT + "test_weights_in_8_bits_are_read_as_their_dequantized_values"
PART = ("tests/mcore/test_attention.py::test_a_part_of_each_head_is_rotated",)
SHARED = "tests/equivalence/test_layouts.py::test_family[deepseek-tp1-pp1-cp1-dp1-ep1-etp1]"
FREQUENCIES = "tests/models/test_rotary.py::test_frequencies_and_scales_are_those_of_transformers"

OF_THE_FAMILIES = (
    SeededBug(
        "latent attention: the first part of a query is rotated, not the last", "design", LATENT,
        "plain, rotated = query.split((sizes.plain_dim, self.rotary.dim), dim=-1)\n"
        "        query = torch.cat((plain, rotate(rotated, cos, sin, interleaved=self.rotary.interleaved)), dim=-1)",
        "rotated, plain = query.split((self.rotary.dim, sizes.plain_dim), dim=-1)\n"
        "        query = torch.cat((rotate(rotated, cos, sin, interleaved=self.rotary.interleaved), plain), dim=-1)",
        (MODULE,),
    ),
    SeededBug(
        "latent attention: neighbours and halves exchanged as rotated pairs", "several converters", LATENT,
        "turned = rotate(turned, cos, sin, interleaved=self.rotary.interleaved)",
        "turned = rotate(turned, cos, sin, interleaved=not self.rotary.interleaved)", (MODULE,),
    ),
    SeededBug(
        "latent attention: scores without YaRN's scale", "several trainers", LATENT,
        "softmax_scale=self.rotary.score_scale / math.sqrt", "softmax_scale=1.0 / math.sqrt", (MODULE,),
    ),
    SeededBug(
        "latent attention: the latents' norms with the model's epsilon", "several engines", LATENT,
        "self.kv_layernorm = RMSNorm(config, sizes.key_value_rank, sizes.norm_eps)",
        "self.kv_layernorm = RMSNorm(config, sizes.key_value_rank, config.layernorm_epsilon)", (MODULE,),
    ),
    SeededBug(
        "latent attention: keys and values cut at the wrong place", "design", LATENT,
        "split((sizes.plain_dim, sizes.value_dim), dim=-1)",
        "split((sizes.value_dim, sizes.plain_dim), dim=-1)[::-1]", (MODULE,),
    ),
    SeededBug(
        "latent attention: each tensor-parallel rank with its own tokens' rotated key", "design", LATENT,
        "turned = tensor_parallel.gather_from_sequence_parallel_region(turned, group=self.tp_group)",
        "turned = turned.repeat(self.tp_group.size(), 1, 1)", (TENSOR,),
    ),
    SeededBug(
        "latent attention: gradients of the projections to latents not summed", "design", LATENT,
        "self.weight.sequence_parallel = config.sequence_parallel", "self.weight.sequence_parallel = False", (TENSOR,),
    ),
    SeededBug(
        "YaRN: cosines and sines without their scale", "several trainers", ATTENTION,
        "(wave * rotary.cosine_scale).to(dtype)", "wave.to(dtype)", (MODULE,),
    ),
    SeededBug(
        "YaRN: slow and fast frequencies exchanged", "design", ROTARY,
        "return plain / self.yarn.factor * share + plain * (1 - share)",
        "return plain / self.yarn.factor * (1 - share) + plain * share", (FREQUENCIES,),
    ),
    SeededBug(
        "YaRN: the ramp is not rounded to whole pairs", "one engine", ROTARY,
        "if yarn.rounds:", "if not yarn.rounds:", (FREQUENCIES,),
    ),
    SeededBug(
        "YaRN: cosines scaled though both magnitudes are given", "one engine", READER,
        "if numerator and denominator:", "if numerator and not denominator:", (FREQUENCIES,),
    ),
    SeededBug(
        "part of a head rotated: its last dimensions, not its first", "several engines", ATTENTION,
        "turned, rest = x.split((rotary.dim, x.shape[-1] - rotary.dim), dim=-1)",
        "rest, turned = x.split((x.shape[-1] - rotary.dim, rotary.dim), dim=-1)",
        PART,
    ),
    SeededBug(
        "part of a head rotated: the usual share instead of the config's", "one trainer",
        "megatron_gspo/models/qwen_next.py",
        "rotary_of(config, rotated_dims(config, shape.head_dim))", "rotary_of(config, int(shape.head_dim * 0.25))",
        ("tests/models/test_qwen_next.py::test_facts_are_read_from_the_config",),
    ),
    SeededBug(
        "part of a head rotated: frequencies spaced as over a head twice as wide", "several engines", ROTARY,
        "torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)",
        "torch.arange(0, self.dim, 2, dtype=torch.float32) / (2 * self.dim))", (FREQUENCIES,),
    ),
    SeededBug(
        "part of a head rotated: the share of rope_parameters not read", "one trainer", "megatron_gspo/models/glm.py",
        "rotary_of(config, rotated_dims(config, shape.head_dim))",
        'rotary_of(config, int(shape.head_dim * config["partial_rotary_factor"]))',
        ("tests/models/test_glm.py::test_biases_and_norms_are_options_and_the_rotated_share_has_two_places",),
    ),
    SeededBug(
        "bias left at 0 when weights are loaded", "Megatron-Bridge", "megatron_gspo/mcore/hf_weights.py",
        "if mapped.rule is VALUE_HEAD and mapped.names[0] not in reader.names:",
        "if mapped.rule.keeps_float32 or mapped.rule is VALUE_HEAD and mapped.names[0] not in reader.names:", (FROZEN,),
    ),
    SeededBug(
        "bias rounded to bfloat16", "miles", BIAS,
        KEPT, "pass", (FROZEN,),
    ),
    SeededBug(
        "bias updated though it is frozen", "design", BIAS, "if frozen:", "if not frozen:",
        (FROZEN, OF_BIAS + "test_an_update_rate_moves_it_towards_an_even_load"),
    ),
    SeededBug(
        "load not counted for the update of the bias", "design", BIAS,
        "router.local_tokens_per_expert += routing_map.sum(0)", "pass",
        (OF_BIAS + "test_an_update_rate_moves_it_towards_an_even_load",),
    ),
    SeededBug(
        "weights of experts without the scaling factor", "several trainers", MODEL,
        "moe_router_topk_scaling_factor=router.scaling if router.scaling != 1 else None",
        "moe_router_topk_scaling_factor=None", (CHOICE,),
    ),
    SeededBug(
        "experts chosen from all groups", "several trainers", MODEL,
        "moe_router_group_topk=router.chosen_groups if router.groups > 1 else None",
        "moe_router_group_topk=router.groups if router.groups > 1 else None", (CHOICE,),
    ),
    SeededBug(
        "weights of experts from the scores with the bias", "several trainers", BIAS, KEPT,
        KEPT + "\n                router.register_forward_hook("
        "lambda module, args, out: (out[0] + out[1] * module.expert_bias, out[1]))", (CHOICE,),
    ),
    SeededBug(
        "width of one shared expert for all", "one converter", READER,
        'config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0)', 'config["moe_intermediate_size"]',
        ("tests/models/test_deepseek.py::test_shared_experts_are_one_as_wide_as_all",),
    ),
    SeededBug(
        "gate and up projection of shared experts exchanged", "several converters", TABLES,
        '("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight")',
        '("mlp.shared_experts.up_proj.weight", "mlp.shared_experts.gate_proj.weight")', (SHARED,),
    ),
    SeededBug(
        "gate and up rows of shared experts alternate", "several converters", TABLES,
        '("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),\n        Shard.ROWS,\n'
        "        merge_rows,\n        split_two,\n        applies",
        '("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),\n        Shard.ROWS,\n'
        "        lambda parts, shape: merge_rows(parts, shape).unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1),\n"
        "        split_two,\n        applies",
        ("tests/models/test_rule_tables.py::test_every_rule_gives_back_what_it_was_given",),
    ),
    SeededBug(
        "router entropy of the scores with the bias", "design", HOOKS,
        "scores = scores if bias is None else scores - bias", "scores = scores + 0",
        (OF_BIAS + "test_entropy_is_that_of_the_scores_without_the_bias",),
    ),
    SeededBug(
        "bias stored in the type of the other weights", "one converter", "megatron_gspo/models/parameter_slices.py",
        "return torch.float32 if self.rule.keeps_float32 else dtype", "return dtype",
        (CONVERT + "test_the_bias_stays_in_float32_and_files_come_back_byte_by_byte",),
    ),
    SeededBug(
        "scales of 8-bit blocks from the beginning of the tensor for every slice", "design", FILES,
        "firsts = (start if dim == 0 else 0, start if dim == 1 else 0)", "firsts = (0, 0)",
        (EIGHT_BITS,),
    ),
    SeededBug(
        "8-bit blocks of 128 x 128 whatever the config says", "one converter", FILES,
        "size = given or [128, 128]", "size = [128, 128]", (EIGHT_BITS,),
    ),
    SeededBug(
        "8-bit values divided by their scale", "several converters", FORMATS,
        "return values.float() * scales.float()[rows][:, columns]",
        "return values.float() / scales.float()[rows][:, columns]", (EIGHT_BITS,),
    ),
    SeededBug(
        "8-bit values scaled in bfloat16", "one converter", FORMATS,
        "return values.float() * scales.float()[rows][:, columns]",
        "return (values.bfloat16() * scales.bfloat16()[rows][:, columns]).float()", (EIGHT_BITS,),
    ),
    SeededBug(
        "scales of 8-bit blocks among the model's tensors", "design", FILES,
        "if name.removesuffix(_SCALE) not in self._files or not _is_scale(name)}", "}", (EIGHT_BITS,),
    ),
    SeededBug(
        "config of an export still names a quantization", "one trainer", "megatron_gspo/models/companions.py",
        "    changed = _without_quantization(changed)\n", "",
        (EIGHT_BITS,),
    ),
    SeededBug(
        "names of any further layers pass as multi-token prediction", "design", READER,
        "for layer in range(first, first + number))", "for layer in range(first, first + 1 + number))",
        (CONVERT + "test_names_of_further_layers_are_refused_without_multi_token_prediction",),
    ),
)  # fmt: skip
