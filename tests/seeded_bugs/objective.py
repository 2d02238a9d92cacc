"""Bugs of the objective and of its inputs."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

LOSS, WEIGHTS = "megatron_gspo/algorithms/policy_loss.py", "megatron_gspo/algorithms/aggregation.py"
LEVELS, RATIO = "megatron_gspo/algorithms/ratio_levels.py", "megatron_gspo/algorithms/ratio.py"
SEGMENTS = "megatron_gspo/algorithms/segments.py"
SURROGATE, ADVANTAGES = "megatron_gspo/algorithms/surrogate.py", "megatron_gspo/algorithms/advantages.py"
WORKED = "tests/algorithms/test_worked_cases.py::"
NAIVE = "tests/algorithms/test_policy_loss.py::test_value_and_gradient_in_float64"
UNREAD = "tests/algorithms/test_robustness.py::test_untrained_positions_are_never_read"
CUTS = "tests/properties/test_objective.py::test_any_cut_adds_up_to_the_whole"

OBJECTIVE = (
    SeededBug(
        "sequence ratio from one context rank's tokens", "several trainers", LEVELS,
        "mean_log_ratio = total / lengths.clamp_min(1)", "mean_log_ratio = sums / lengths.clamp_min(1)", (CUTS,),
    ),
    SeededBug(
        "normalised by the micro-batch's sequences", "three trainers; verl without global counts", LOSS,
        "lengths, num_sequences, num_tokens, dtype)",
        "lengths, (lengths > 0).sum().clamp_min(1), num_tokens, dtype)", (CUTS,),
    ),
    SeededBug(
        "normalised by the micro-batch's tokens", "three trainers; TRL's bnpo", LOSS,
        "lengths, num_sequences, num_tokens, dtype)",
        "lengths, num_sequences, lengths.sum().clamp_min(1), dtype)", (CUTS,),
    ),
    SeededBug(
        "sequences weighted by their tokens", "three trainers; verl's and TRL's defaults", WEIGHTS,
        "weight = sequence.index_select(0, segment_ids)", "weight = token",
        (WORKED + "test_length_weighting_tells_the_algorithms_apart",),
    ),
    SeededBug(
        "mask ignored in the ratio", "one trainer", SEGMENTS,
        "return torch.where(self.loss_mask, values, 0).to(dtype)",
        "return values.to(dtype)", (UNREAD,),
    ),
    SeededBug(
        "mask applied as a product, so that NaN passes", "TRL, verl", SEGMENTS,
        "return torch.where(self.loss_mask, values, 0).to(dtype)",
        "return (values * self.loss_mask).to(dtype)", (UNREAD,),
    ),
    SeededBug(
        "mask ignored in the weights of the tokens", "one trainer", LEVELS,
        "clamped, segments.loss_mask, clip,", "clamped, torch.ones_like(segments.loss_mask), clip,",
        ("tests/algorithms/test_policy_loss.py::test_metrics_against_counting",),
    ),
    SeededBug(
        "mask never applied", "one trainer", LOSS,
        "segments = Segments(loss_mask.bool(),",
        "segments = Segments(torch.ones_like(loss_mask, dtype=torch.bool),", (NAIVE,),
    ),
    SeededBug(
        "exp of the sum, without the length", "one trainer", LEVELS,
        "mean_log_ratio = total / lengths.clamp_min(1)", "mean_log_ratio = total",
        (WORKED + "test_ratio_of_doubled_likelihood_has_the_length_exponent",),
    ),
    SeededBug(
        "train/rollout weight of a sequence without the length", "one trainer",
        "megatron_gspo/algorithms/importance_sampling.py",
        "return total / lengths.clamp_min(1)", "return total",
        ("tests/algorithms/test_importance_sampling.py::test_sequence_weights_are_length_normalised",),
    ),
    SeededBug(
        "|y| counts masked and padded positions", "design", LEVELS,
        "counts, sums = segments.sums(segments.loss_mask),",
        "counts, sums = segments.sums(torch.ones_like(segments.loss_mask)),",
        (NAIVE,),
    ),
    SeededBug(
        "clipped for either sign of the advantage", "design", SURROGATE,
        "    lower = (advantages < 0) & (ratio < low)\n    upper = (advantages > 0) & (ratio > high)\n",
        "    lower = ratio < low\n    upper = ratio > high\n", (NAIVE,),
    ),
    SeededBug(
        "CISPO's weight has a gradient", "design", SURROGATE,
        "    return weight * advantages * log_probs, Clip(lower, lower | upper, None)",
        "    return ratio.clamp(low, high) * advantages * log_probs, Clip(lower, lower | upper, None)", (NAIVE,),
    ),
    SeededBug(
        "SAPO's temperatures exchanged", "design", SURROGATE,
        "masked_fill(advantages > 0, positive)", "masked_fill(advantages < 0, positive)", (NAIVE,),
    ),
    SeededBug(
        "DPPO masks what moved against the advantage", "design", SURROGATE,
        "upper = beyond & (advantages > 0) & (log_ratio > 0)", "upper = beyond & (advantages > 0) & (log_ratio < 0)",
        (NAIVE,),
    ),
    SeededBug(
        "DPPO's KL in the other direction", "design", SURROGATE,
        "binary_kl(old_log_probs, log_probs)", "binary_kl(log_probs, old_log_probs)",
        ("tests/algorithms/test_worked_cases.py::test_dppo_kl_measures_this_token_against_all_others",),
    ),
    SeededBug(
        "GMPO clips after the mean", "design", LEVELS,
        "bounded = torch.where(clip.cut, log_ratio.clamp(low, high), log_ratio)", "bounded = log_ratio", (NAIVE,),
    ),
    SeededBug(
        "MiniRL weighs by the old policy in place of the rollout engine", "design", SURROGATE,
        "weight = (log_probs - rollout_log_probs).clamp", "weight = log_ratio.clamp",
        ("tests/algorithms/test_worked_cases.py::"
         "test_minirl_clips_by_the_old_policy_and_weighs_by_the_rollout_engine",),
    ),
    SeededBug(
        "the off-policy mask also drops good responses", "design", LEVELS,
        "masked = (advantages < 0) & (mean_log_ratio", "masked = (advantages != 0) & (mean_log_ratio", (NAIVE,),
    ),
    SeededBug(
        "excluded tokens leave the denominators of IcePop", "design", "megatron_gspo/loop/rollout_correction.py",
        'if algorithm.rollout_rs_denominator == "all":', 'if algorithm.rollout_rs_denominator == "none":',
        ("tests/loop/test_rollout_correction.py::test_excluded_tokens_may_stay_in_the_denominators",),
    ),
    SeededBug(
        "sequence ratio without a gradient", "design", RATIO,
        "return grad * slope.index_select(0, segment_ids),", "return torch.zeros_like(grad),", (NAIVE,),
    ),
    SeededBug(
        "no limit on the log-ratio", "TRL", RATIO,
        "return log_ratio.clamp(-max_log_ratio, max_log_ratio).exp(),", "return log_ratio.exp(),",
        ("tests/algorithms/test_robustness.py::test_a_broken_sequence_is_clamped_counted_and_without_gradient",),
    ),
    SeededBug(
        "bfloat16 log-probs taken", "one trainer", LOSS,
        "value.dtype not in (torch.float32, torch.float64)", "not value.is_floating_point()",
        ("tests/algorithms/test_robustness.py::test_half_precision_log_probs_are_refused",),
    ),
    SeededBug(
        "a device synchronisation in the loss", "several trainers", LEVELS,
        "mean_log_ratio = total / lengths.clamp_min(1)", "mean_log_ratio = total / max(float(lengths[0]), 1.0)",
        ("tests/algorithms/test_invariance.py::test_no_device_synchronisation",),
    ),
    SeededBug(
        "GSPO with a token mean is not refused", "verl", "megatron_gspo/algorithms/objective_checks.py",
        "if o.sequence_level and by_length:", "if o.sequence_level and by_length and o.loss_scale_factor:",
        ("tests/algorithms/test_objective_checks.py::test_refusals_follow_the_ratio_level_whatever_the_name",),
    ),
    SeededBug(
        "population standard deviation for the sample's", "design", ADVANTAGES,
        'freedom = groups.count - 1 if std == "sample" else groups.count', "freedom = groups.count",
        ("tests/algorithms/test_advantages.py::test_sample_std_worked_case_is_the_default",),
    ),
    SeededBug(
        "equal rewards divided by their rounding error", "verl", ADVANTAGES,
        "return Groups(index, count, mean, highest > lowest)", "return Groups(index, count, mean, count > 1)",
        ("tests/algorithms/test_advantages.py::test_equal_rewards_give_exactly_zero",),
    ),
    SeededBug(
        "an epsilon added to the standard deviation", "TRL, verl", ADVANTAGES,
        "deviations = (squares / freedom.clamp_min(1)).sqrt()",
        "deviations = (squares / freedom.clamp_min(1)).sqrt() + 1e-4",
        ("tests/algorithms/test_advantages.py::test_against_a_loop_with_scattered_group_ids",),
    ),
    SeededBug(
        "KL of the reference to the policy", "design", "megatron_gspo/algorithms/kl.py",
        "difference = log_probs - ref_log_probs.detach()", "difference = ref_log_probs.detach() - log_probs",
        (WORKED + "test_kl_terms_by_hand",),
    ),
    SeededBug(
        "the clipped value loss takes the smaller error", "design", "megatron_gspo/algorithms/value_loss.py",
        "cut = clipped > error", "cut = clipped < error", ("tests/algorithms/test_value_loss.py::test_by_hand",),
    ),
    SeededBug(
        "GAE without the next value", "design", "megatron_gspo/algorithms/gae.py",
        "rewards.double() + gamma * following - values", "rewards.double() - values",
        ("tests/algorithms/test_gae.py::test_by_hand",),
    ),
    SeededBug(
        "observations are steps of GAE", "several trainers", "megatron_gspo/loop/gae.py",
        "trained = np.flatnonzero(sample.loss_mask)", "trained = np.arange(sample.response_length)",
        ("tests/loop/test_gae.py::test_observations_are_no_steps_of_the_trajectory",),
    ),
    SeededBug(
        "the value head's gradient stays on its tensor-parallel rank", "design", "megatron_gspo/mcore/value_head.py",
        'setattr(self.weight, "sequence_parallel", config.sequence_parallel)',
        'setattr(self.weight, "sequence_parallel", False)',
        ("tests/mcore/test_value_steps.py::test_values_loss_and_gradients_in_every_layout",),
    ),
)  # fmt: skip

DATA = (
    SeededBug(
        "response without a trained token still counted in N", "TRL", "megatron_gspo/data/packing.py",
        "return sum(count > 0 for count in trained), sum(trained)", "return len(trained), sum(trained)",
        ("tests/data/test_packing.py::test_counts_leave_out_sequences_without_a_trained_token",),
    ),
    SeededBug(
        "mask and advantages one position late", "design", "megatron_gspo/data/packing.py",
        "        first = start + sample.prompt_length - 1\n        out[first :",
        "        first = start + sample.prompt_length\n        out[first :",
        ("tests/data/test_packing.py::test_by_hand",),
    ),
    SeededBug(
        "rollout log-probs without the temperature", "several trainers",
        "megatron_gspo/rollout/embedded/token_sampling.py",
        "if sampling.scoring_temperature != 1.0:", "if sampling.greedy:",
        ("tests/rollout/embedded/test_token_sampling.py::test_drawn_frequencies_match_the_exact_distribution",),
    ),
    SeededBug(
        "a histogram's bins are off by one", "design", "megatron_gspo/algorithms/ratio_histogram.py",
        "clamp_(-1, _GROWING - 1).add_(1)", "clamp_(-1, _GROWING - 1).add_(2)",
        ("tests/algorithms/test_ratio_histogram.py::test_every_bin_by_its_borders",),
    ),
)  # fmt: skip
