"""Bugs of the objectives: formulas, masks, normalisation, advantages and what the loss reads."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

OBJECTIVE = (
    SeededBug(
        name="ratio quantiles: ratios that wait to be counted are left out",
        file="megatron_gspo/algorithms/ratio_histogram.py",
        before="_count_waiting([self])\n        return self._counts",
        after="return self._counts",
        test=(
            "tests/algorithms/test_ratio_histogram.py"
            "::test_against_sorted_values_however_they_are_split"
        ),
    ),
    SeededBug(
        name="score centering: the tail has the policy's own mass",
        file="megatron_gspo/algorithms/score_centering.py",
        before="rho = rest_of_q / rest_of_p",
        after="rho = torch.ones_like(rest_of_p)",
        test=(
            "tests/algorithms/test_score_centering.py"
            "::test_the_expected_gradient_is_the_covariance_alone"
        ),
    ),
    SeededBug(
        name="score centering: the coefficients have a gradient",
        file="megatron_gspo/algorithms/score_centering.py",
        before="with torch.no_grad():\n        p = log_probs.exp()",
        after="with torch.enable_grad():\n        p = log_probs.exp()",
        test="tests/algorithms/test_score_centering.py::test_value_and_gradient_against_a_loop",
    ),
    SeededBug(
        name="score centering: the weight of a token is missing from the centre",
        file="megatron_gspo/algorithms/score_centering.py",
        before="coefficients = _weighted(score_centering, p, q) - alpha * p",
        after="coefficients = q - alpha * p",
        test="tests/algorithms/test_score_centering.py::test_value_and_gradient_against_a_loop",
    ),
    SeededBug(
        name="score centering: the engine's most likely ids of the token before",
        file="megatron_gspo/rollout/embedded/decode.py",
        before="top_ids[t].index_copy_(0, live, choice.top_ids.int())",
        after="top_ids[t - 1].index_copy_(0, live, choice.top_ids.int())",
        test=(
            "tests/rollout/embedded/test_embedded_engine.py"
            "::test_the_most_likely_ids_belong_to_their_tokens"
        ),
    ),
    SeededBug(
        name="score centering: the draw takes the place of the last of vLLM's ids",
        file="megatron_gspo/rollout/vllm/vllm_api.py",
        before="return wanted + 1 if wanted else 0",
        after="return wanted",
        test=(
            "tests/rollout/vllm/test_vllm_api.py"
            "::test_log_probs_are_requested_where_they_are_over_the_whole_vocabulary"
        ),
    ),
    SeededBug(
        name="sequence ratio from one context rank's tokens",
        file="megatron_gspo/algorithms/ratio_levels.py",
        before="mean_log_ratio = total / lengths.clamp_min(1)",
        after="mean_log_ratio = sums / lengths.clamp_min(1)",
        test="tests/properties/test_objective.py::test_any_cut_adds_up_to_the_whole",
    ),
    SeededBug(
        name="normalised by the micro-batch's sequences",
        file="megatron_gspo/algorithms/policy_loss.py",
        before="lengths, num_sequences, num_tokens, dtype",
        after="lengths, (lengths > 0).sum().clamp_min(1), num_tokens, dtype",
        test="tests/properties/test_objective.py::test_any_cut_adds_up_to_the_whole",
    ),
    SeededBug(
        name="sequences weighted by their tokens",
        file="megatron_gspo/algorithms/aggregation.py",
        before="weight = sequence.index_select(0, segment_ids)",
        after="weight = token",
        test="tests/algorithms/test_worked_cases.py::test_length_weighting_tells_the_algorithms_apart",
    ),
    SeededBug(
        name="mask applied as a product, so that NaN passes",
        file="megatron_gspo/algorithms/segments.py",
        before="torch.where(self.loss_mask, values, 0).to(dtype)",
        after="(values * self.loss_mask).to(dtype)",
        test="tests/algorithms/test_robustness.py::test_untrained_positions_are_never_read",
    ),
    SeededBug(
        name="exp of the sum, without the length",
        file="megatron_gspo/algorithms/ratio_levels.py",
        before="mean_log_ratio = total / lengths.clamp_min(1)",
        after="mean_log_ratio = total",
        test="tests/algorithms/test_worked_cases.py::test_ratio_of_doubled_likelihood_has_the_length_exponent",
    ),
    SeededBug(
        name="train/rollout weight of a sequence without the length",
        file="megatron_gspo/algorithms/importance_sampling.py",
        before="return total / lengths.clamp_min(1)",
        after="return total",
        test="tests/algorithms/test_importance_sampling.py::test_sequence_weights_are_length_normalised",
    ),
    SeededBug(
        name="|y| counts masked and padded positions",
        file="megatron_gspo/algorithms/ratio_levels.py",
        before="sums = segments.sums(tokens.log_ratio.detach())",
        after="sums = segments.sums(tokens.log_ratio.detach())\n"
        "    counts = segments.sums(torch.ones_like(segments.loss_mask))",
        test="tests/algorithms/test_policy_loss.py::test_value_and_gradient_in_float64",
    ),
    SeededBug(
        name="clipped for either sign of the advantage",
        file="megatron_gspo/algorithms/surrogate.py",
        before="upper = (terms.advantages > 0) & (terms.ratio > high)",
        after="upper = terms.ratio > high",
        test="tests/algorithms/test_policy_loss.py::test_value_and_gradient_in_float64",
    ),
    SeededBug(
        name="MiniRL weighs by the old policy in place of the rollout engine",
        file="megatron_gspo/algorithms/surrogate.py",
        before="weight = (terms.log_probs - terms.rollout_log_probs)",
        after="weight = terms.log_ratio",
        test="tests/algorithms/test_worked_cases.py::test_minirl_clips_by_the_old_policy_and_weighs_by_the_rollout_engine",
    ),
    SeededBug(
        name="excluded tokens leave the denominators of IcePop",
        file="megatron_gspo/loop/rollout_correction.py",
        before="algorithm.rollout_rs_denominator == 'all'",
        after="algorithm.rollout_rs_denominator == 'none'",
        test="tests/loop/test_rollout_correction.py::test_excluded_tokens_may_stay_in_the_denominators",
    ),
    SeededBug(
        name="sequence ratio without a gradient",
        file="megatron_gspo/algorithms/ratio.py",
        before="return (grad * slope.index_select(0, segment_ids), None, None, None)",
        after="return (torch.zeros_like(grad), None, None, None)",
        test="tests/algorithms/test_policy_loss.py::test_value_and_gradient_in_float64",
    ),
    SeededBug(
        name="no limit on the log-ratio",
        file="megatron_gspo/algorithms/ratio.py",
        before="log_ratio.clamp(-max_log_ratio, max_log_ratio).exp()",
        after="log_ratio.exp()",
        test="tests/algorithms/test_robustness.py::test_a_broken_sequence_is_clamped_counted_and_without_gradient",
    ),
    SeededBug(
        name="population standard deviation for the sample's",
        file="megatron_gspo/algorithms/advantages.py",
        before="groups.count - 1 if std == 'sample' else groups.count",
        after="groups.count",
        test="tests/algorithms/test_advantages.py::test_sample_std_worked_case_is_the_default",
    ),
    SeededBug(
        name="equal rewards divided by their rounding error",
        file="megatron_gspo/algorithms/advantages.py",
        before="Groups(index, count, mean, highest > lowest)",
        after="Groups(index, count, mean, count > 1)",
        test="tests/algorithms/test_advantages.py::test_equal_rewards_give_exactly_zero",
    ),
    SeededBug(
        name="KL of the reference to the policy",
        file="megatron_gspo/algorithms/kl.py",
        before="log_probs - ref_log_probs.detach()",
        after="ref_log_probs.detach() - log_probs",
        test="tests/algorithms/test_worked_cases.py::test_kl_terms_by_hand",
    ),
    SeededBug(
        name="the clipped value loss takes the smaller error",
        file="megatron_gspo/algorithms/value_loss.py",
        before="cut = clipped > error",
        after="cut = clipped < error",
        test="tests/algorithms/test_value_loss.py::test_by_hand",
    ),
    SeededBug(
        name="GAE without the next value",
        file="megatron_gspo/algorithms/gae.py",
        before="rewards.double() + gamma * following - values",
        after="rewards.double() - values",
        test="tests/algorithms/test_gae.py::test_by_hand",
    ),
    SeededBug(
        name="observations are steps of GAE",
        file="megatron_gspo/loop/gae.py",
        before="is_step = responses['loss_mask'] & responses.repeat(counted)",
        after="is_step = responses.repeat(counted)",
        test="tests/loop/test_gae.py::test_observations_are_no_steps_of_the_trajectory",
    ),
    SeededBug(
        name="response without a trained token still counted in N",
        file="megatron_gspo/data/packing.py",
        before="sum((count > 0 for count in trained)), sum(trained)",
        after="len(trained), sum(trained)",
        test="tests/data/test_packing.py::test_counts_leave_out_sequences_without_a_trained_token",
    ),
    SeededBug(
        name="the loss mask one position late",
        file="megatron_gspo/data/packing.py",
        before="[in_sample][1:]",
        after="[in_sample][:-1]",
        test="tests/data/test_packing.py::test_by_hand",
    ),
    SeededBug(
        name="advantages one position late",
        file="megatron_gspo/data/packing.py",
        before="np.copyto(out[packed], values, where=where)",
        after="np.copyto(out[packed], np.roll(values, 1), where=where)",
        test="tests/data/test_packing.py::test_by_hand",
    ),
    SeededBug(
        name="rollout log-probs without the temperature",
        file="megatron_gspo/rollout/embedded/token_sampling.py",
        before="if sampling.scoring_temperature != 1.0:",
        after="if sampling.greedy:",
        test="tests/rollout/embedded/test_token_sampling.py::test_drawn_frequencies_match_the_exact_distribution",
    ),
    SeededBug(
        name="an episode's turns compared with all turns",
        file="megatron_gspo/algorithms/turn_advantages.py",
        before="turn_numbers(torch.as_tensor(episode_ids))",
        after="torch.zeros_like(torch.as_tensor(episode_ids))",
        test="tests/algorithms/test_turn_advantages.py::test_against_a_naive_loop",
    ),
    SeededBug(
        name="weights of a sequence count tokens that are rejected",
        file="megatron_gspo/loop/rollout_correction.py",
        before="tokens = tokens.with_mask(kept)",
        after="pass",
        test="tests/loop/test_rollout_correction.py::test_the_weight_of_a_sequence_is_that_of_the_tokens_left",
    ),
)
