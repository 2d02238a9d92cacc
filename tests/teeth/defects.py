"""The defects, as plain data: an exact piece of source text and what to put in its place.

Most were met in other frameworks; "design" marks those that this one could have grown itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """One wrong version of the code.

    `seen_in`: where it was met. `file`: relative to the project. `before`: text that occurs in it once; `after` takes
    its place. `tests`: pytest ids, at least one of which must fail with an assertion.
    """

    name: str
    seen_in: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


LOSS, SHARES = "megatron_gspo/algorithms/policy_loss.py", "megatron_gspo/algorithms/aggregation.py"
RATIO, ADVANTAGES = "megatron_gspo/algorithms/ratio.py", "megatron_gspo/algorithms/advantages.py"
LOG_PROBS, CONTEXT = "megatron_gspo/parallel/log_probs.py", "megatron_gspo/parallel/context.py"
MODEL, FORWARD = "megatron_gspo/mcore/model.py", "megatron_gspo/mcore/forward.py"

WORKED = "tests/algorithms/test_worked_cases.py::"
NAIVE = "tests/algorithms/test_policy_loss.py::test_value_and_gradient_in_float64"
UNREAD = "tests/algorithms/test_robustness.py::test_untrained_positions_are_never_read"
CUTS = "tests/properties/test_objective.py::test_any_cut_adds_up_to_the_whole"
SOFTMAX = "tests/parallel/test_log_probs.py::test_matches_log_softmax"
SPLIT_SOFTMAX = "tests/parallel/test_log_probs.py::test_tensor_parallel_matches_log_softmax"

OBJECTIVE = (
    Defect(
        "sequence ratio from one context rank's tokens", "several trainers", LOSS,
        "mean_log_ratio = total / lengths.clamp_min(1)", "mean_log_ratio = row / lengths.clamp_min(1)", (CUTS,),
    ),
    Defect(
        "normalised by the micro-batch's sequences", "three trainers; verl without global counts", LOSS,
        "per_token_lengths, num_sequences, num_tokens)",
        "per_token_lengths, (lengths > 0).sum().clamp_min(1), num_tokens)", (CUTS,),
    ),
    Defect(
        "normalised by the micro-batch's tokens", "three trainers; TRL's bnpo", LOSS,
        "per_token_lengths, num_sequences, num_tokens)",
        "per_token_lengths, num_sequences, lengths.sum().clamp_min(1))", (CUTS,),
    ),
    Defect(
        "sequences weighted by their tokens", "three trainers; verl's and TRL's defaults", SHARES,
        "of_objective = of_sequences", "of_objective = of_tokens",
        (WORKED + "test_length_weighting_tells_the_algorithms_apart",),
    ),
    Defect(
        "mask ignored in the ratio", "one trainer", LOSS,
        "return torch.where(mask, x, 0).to(dtype)", "return x.to(dtype)", (UNREAD,),
    ),
    Defect(
        "mask applied as a product, so that NaN passes", "TRL, verl", LOSS,
        "return torch.where(mask, x, 0).to(dtype)", "return (x * mask).to(dtype)", (UNREAD,),
    ),
    Defect(
        "mask ignored in the weights of the tokens", "one trainer", SHARES,
        "trained = mask.to(lengths.dtype)", "trained = torch.ones_like(mask, dtype=lengths.dtype)",
        ("tests/algorithms/test_policy_loss.py::test_metrics_against_counting",),
    ),
    Defect(
        "mask never applied", "one trainer", LOSS,
        "mask, dtype = raw.mask != 0, raw.log_probs.dtype",
        "mask, dtype = torch.ones_like(raw.mask, dtype=torch.bool), raw.log_probs.dtype", (NAIVE,),
    ),
    Defect(
        "exp of the sum, without the length", "one trainer", LOSS,
        "mean_log_ratio = total / lengths.clamp_min(1)", "mean_log_ratio = total",
        (WORKED + "test_ratio_of_doubled_likelihood_has_the_length_exponent",),
    ),
    Defect(
        "train/rollout weight of a sequence without the length", "one trainer",
        "megatron_gspo/algorithms/rollout_correction.py",
        "mean = sums[0] / sums[1].clamp_min(1)", "mean = sums[0]",
        ("tests/algorithms/test_rollout_correction.py::test_sequence_weights_are_length_normalised",),
    ),
    Defect(
        "|y| counts masked and padded positions", "design", LOSS,
        "count = segment_sums(tokens.mask, ids, n)", "count = segment_sums(torch.ones_like(tokens.mask), ids, n)",
        (NAIVE,),
    ),
    Defect(
        "clipped whatever the advantage's sign", "design", RATIO,
        "        lower = (advantages < 0) & (ratio < low)\n        upper = (advantages > 0) & (ratio > high)\n",
        "        lower = ratio < low\n        upper = ratio > high\n", (NAIVE,),
    ),
    Defect(
        "sequence ratio without a gradient", "design", RATIO,
        "return value * (live - live.detach()).exp(), clamped", "return value * (live * 0).exp(), clamped", (NAIVE,),
    ),
    Defect(
        "no limit on the log-ratio", "TRL", RATIO,
        "return log_ratio.clamp(-max_log_ratio, max_log_ratio).exp(),", "return log_ratio.exp(),",
        ("tests/algorithms/test_robustness.py::test_a_broken_sequence_is_clamped_counted_and_without_gradient",),
    ),
    Defect(
        "bfloat16 log-probs taken", "one trainer", LOSS,
        "value.dtype not in (torch.float32, torch.float64)", "not value.is_floating_point()",
        ("tests/algorithms/test_robustness.py::test_half_precision_log_probs_are_refused",),
    ),
    Defect(
        "a device synchronisation in the loss", "several trainers", LOSS,
        "mean_log_ratio = total / lengths.clamp_min(1)", "mean_log_ratio = total / max(float(lengths[0]), 1.0)",
        ("tests/algorithms/test_invariance.py::test_no_device_synchronisation",),
    ),
    Defect(
        "GSPO with a token mean is not refused", "verl", "megatron_gspo/algorithms/objective.py",
        'if o.sequence_level and o.aggregation != "sequence_mean":',
        'if o.sequence_level and o.aggregation == "constant":',
        ("tests/algorithms/test_objective.py::test_refusals_follow_the_ratio_level_whatever_the_name",),
    ),
    Defect(
        "population standard deviation for the sample's", "design", ADVANTAGES,
        'freedom = groups.count - 1 if std == "sample" else groups.count', "freedom = groups.count",
        ("tests/algorithms/test_advantages.py::test_sample_std_worked_case_is_the_default",),
    ),
    Defect(
        "equal rewards divided by their rounding error", "verl", ADVANTAGES,
        "return Groups(index, count, mean, highest > lowest)", "return Groups(index, count, mean, count > 1)",
        ("tests/algorithms/test_advantages.py::test_equal_rewards_give_exactly_zero",),
    ),
    Defect(
        "an epsilon added to the standard deviation", "TRL, verl", ADVANTAGES,
        "spread = (squares / freedom.clamp_min(1)).sqrt()", "spread = (squares / freedom.clamp_min(1)).sqrt() + 1e-4",
        ("tests/algorithms/test_advantages.py::test_against_a_loop_with_scattered_group_ids",),
    ),
    Defect(
        "KL of the reference to the policy", "design", "megatron_gspo/algorithms/kl.py",
        "difference = log_probs - ref_log_probs.detach()", "difference = ref_log_probs.detach() - log_probs",
        (WORKED + "test_kl_terms_by_hand",),
    ),
)  # fmt: skip

DATA = (
    Defect(
        "response without a trained token still counted in N", "TRL", "megatron_gspo/data/packing.py",
        "return sum(count > 0 for count in trained), sum(trained)", "return len(trained), sum(trained)",
        ("tests/data/test_packing.py::test_counts_leave_out_sequences_without_a_trained_token",),
    ),
    Defect(
        "mask and advantages one position late", "design", "megatron_gspo/data/packing.py",
        "        first = start + sample.prompt_length - 1\n        out[first :",
        "        first = start + sample.prompt_length\n        out[first :",
        ("tests/data/test_packing.py::test_by_hand",),
    ),
    Defect(
        "rollout log-probs without the temperature", "several trainers", "megatron_gspo/rollout/sampling.py",
        "if sampling.scoring_temperature != 1.0:", "if sampling.greedy:",
        ("tests/rollout/test_sampling.py::test_drawn_frequencies_match_the_exact_distribution",),
    ),
)  # fmt: skip

PARALLEL = (
    Defect(
        "no sum over the context ranks", "several trainers", CONTEXT,
        "return lambda x: sum_in_place(x.detach().clone(memory_format=torch.contiguous_format), group)",
        "return lambda x: x.detach().clone(memory_format=torch.contiguous_format)",
        ("tests/parallel/test_context.py::test_sum_over_adds_without_touching_its_input",),
    ),
    Defect(
        "gathered keys: a rank keeps its own gradient only", "one trainer", CONTEXT,
        "return scatter_summed_rows(grad, ctx.group), None",
        "return grad.chunk(group_size(ctx.group))[ctx.group.rank()].contiguous(), None",
        ("tests/parallel/test_context.py::test_all_gather_tokens_and_its_gradient",),
    ),
    Defect(
        "gathered keys: gradient counted once for each rank", "several trainers", CONTEXT,
        "return scatter_summed_rows(grad, ctx.group), None",
        "return scatter_summed_rows(grad, ctx.group) * group_size(ctx.group), None",
        ("tests/parallel/test_context.py::test_all_gather_tokens_and_its_gradient",),
    ),
    Defect(
        "context ranks own contiguous chunks where Megatron cuts in zigzag", "design", CONTEXT,
        "second = starts + (2 * cp_size - 1 - cp_rank) * widths", "second = starts + (cp_size + cp_rank) * widths",
        ("tests/parallel/test_context.py::test_worked_case",),
    ),
    Defect(
        "log-probs: no gradient on shards that don't own the label", "one Megatron trainer", LOG_PROBS,
        "        factors = _row_factors(grad_log_probs,",
        "        own = (labels >= tiling.first) & (labels < tiling.first + tiling.rows)\n"
        "        grad_log_probs = None if grad_log_probs is None else grad_log_probs * own\n"
        "        factors = _row_factors(grad_log_probs,",
        (SPLIT_SOFTMAX,),
    ),
    Defect(
        "log-probs: hidden gradient not summed over tensor ranks", "one Megatron trainer", LOG_PROBS,
        "join = scatter_summed_rows if options.sequence_parallel else sum_in_place",
        "join = scatter_summed_rows if options.sequence_parallel else (lambda x, group: x)", (SPLIT_SOFTMAX,),
    ),
    Defect(
        "log-probs in bfloat16", "one trainer", LOG_PROBS,
        "dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)",
        "dtype = torch.promote_types(hidden.dtype, weight.dtype)",
        ("tests/parallel/test_log_probs.py::test_bfloat16_inputs_give_float32_values",),
    ),
    Defect(
        "temperature left out of the log-probs", "several trainers", LOG_PROBS,
        "scale=1.0 / options.temperature", "scale=1.0", (SOFTMAX,),
    ),
    Defect(
        "padding rows of the vocabulary counted in the softmax", "design", LOG_PROBS,
        "rows = min(max(options.vocab_size - first, 0), local_rows)", "rows = local_rows", (SOFTMAX,),
    ),
    Defect(
        "largest values of a metric added up over ranks", "design", "megatron_gspo/parallel/metrics.py",
        'extremes = [name for name in everything if name.endswith(("_max", "_min"))]\n'
        '    sums = [name for name in everything if not name.endswith(("_max", "_min"))]',
        'extremes = [name for name in everything if name.endswith("_min")]\n'
        '    sums = [name for name in everything if not name.endswith("_min")]',
        ("tests/parallel/test_metrics.py::test_sums_and_extremes_with_keys_that_ranks_lack",),
    ),
)  # fmt: skip

CONVERSION = (
    Defect(
        "gate and up projection exchanged", "design", "megatron_gspo/conversion/rules.py",
        "return torch.cat(list(parts), dim=0)", "return torch.cat(list(parts)[::-1], dim=0)",
        ("tests/conversion/test_rules.py::test_gate_lies_above_up",),
    ),
    Defect(
        "query, key and value laid one behind the other", "design", "megatron_gspo/conversion/rules.py",
        "return torch.cat(blocks, dim=1).reshape(-1, *query.shape[1:])", "return torch.cat([query, key, value], dim=0)",
        ("tests/conversion/test_rules.py::test_qkv_rows_lie_group_by_group",),
    ),
    Defect(
        "parameter without a rule dropped", "one converter", "megatron_gspo/mcore/weights.py",
        'raise ValueError(f"no rule of family {family.model_type} matches the Megatron parameter {name}")', "continue",
        ("tests/mcore/test_weights.py::test_broken_checkpoints_name_the_tensor",),
    ),
    Defect(
        "checkpoint tensors that the model doesn't use are passed over", "one converter",
        "megatron_gspo/conversion/families.py",
        "if extra := sorted(names - expected):", "if extra := sorted(expected - expected):",
        ("tests/conversion/test_families.py::test_missing_and_extra_names_are_told",),
    ),
)  # fmt: skip

MEGATRON = (
    Defect(
        "micro-batch average not undone", "design", FORWARD,
        "return loss * (num_microbatches * groups.dp.size())", "return loss * groups.dp.size()",
        ("tests/mcore/test_model.py::test_per_token_loss_is_refused_and_the_share_is_scaled_once",),
    ),
    Defect(
        "expert gradients not added up over tensor-parallel replicas", "megatron-core 0.16.1 - 0.18.2", MODEL,
        "        expert_gradients.apply(chunk, config)\n", "",
        ("tests/patches/test_patches.py::test_expert_gradients_are_added_up_over_tensor_parallel_replicas",),
    ),
    Defect(
        "interleaved stages exchange in batches", "megatron-core", MODEL,
        "overlap_p2p_comm=layout.virtual_pipeline is not None,\n"
        "        batch_p2p_comm=layout.virtual_pipeline is None,",
        "overlap_p2p_comm=False,\n        batch_p2p_comm=True,",
        ("tests/patches/test_patches.py::test_two_interleaved_stages_exchange_unbatched",),
    ),
    Defect(
        "norm gradients not reduced under sequence parallelism", "design", "megatron_gspo/mcore/layers.py",
        "self.weight.sequence_parallel = config.sequence_parallel", "self.weight.sequence_parallel = False",
        ("tests/mcore/test_model.py::test_norms_carry_the_mark_of_sequence_parallelism",),
    ),
    Defect(
        "router's auxiliary loss left on", "two converters; TRL's default", MODEL,
        'moe_router_load_balancing_type="none",  # an auxiliary loss would be an objective that RL didn\'t ask for\n'
        "        moe_aux_loss_coeff=0.0,",
        'moe_router_load_balancing_type="aux_loss",\n        moe_aux_loss_coeff=0.001,',
        ("tests/mcore/test_model.py::test_reinforcement_learning_sets_the_router",),
    ),
    Defect(
        "per-token loss divides the objective again", "design", FORWARD,
        "if unwrap(model).config.calculate_per_token_loss:",
        "if unwrap(model).config.calculate_per_token_loss is None:",
        ("tests/mcore/test_model.py::test_per_token_loss_is_refused_and_the_share_is_scaled_once",),
    ),
    Defect(
        "results counted once for each tensor-parallel rank", "design", "megatron_gspo/mcore/batches.py",
        "if values and groups.tp.rank() == 0:", "if values:",
        ("tests/mcore/test_batches.py::test_every_response_token_comes_back_once_in_every_layout",),
    ),
    Defect(
        "positions under context parallelism counted by the rank", "several trainers",
        "megatron_gspo/mcore/attention.py",
        "positions = mine - starts.repeat_interleave(lengths // cp_size)",
        "positions = torch.cat([torch.arange(int(n)) for n in lengths // cp_size])",
        ("tests/mcore/test_attention.py::test_equals_attention_of_each_sequence_alone",),
    ),
)  # fmt: skip

DEFECTS = OBJECTIVE + DATA + PARALLEL + CONVERSION + MEGATRON
