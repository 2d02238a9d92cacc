"""Bugs of distillation: terms of the divergence, their tail, positions of the teacher's scores."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

DISTILLATION = (
    SeededBug(
        name="terms whose sum alone is a divergence, although the tail is estimated",
        file="megatron_gspo/algorithms/distillation.py",
        before="reverse = p * log_ratio - p + t",
        after="reverse = p * log_ratio",
        test="tests/algorithms/test_distillation.py::test_the_expected_gradient_is_that_of_the_kl",
    ),
    SeededBug(
        name="the tail is that of the computed terms",
        file="megatron_gspo/loop/distillation.py",
        before="np.where(is_summed, 0, of_teacher)",
        after="np.where(is_summed, of_teacher, 0)",
        test=(
            "tests/loop/test_distillation.py"
            "::test_a_token_among_the_teachers_ids_has_its_term_in_the_loss"
        ),
    ),
    SeededBug(
        name="the teacher's advantage has a gradient",
        file="megatron_gspo/algorithms/distillation.py",
        before="log_ratio = teacher_log_probs.detach() - log_probs.detach()",
        after="log_ratio = teacher_log_probs - log_probs",
        test="tests/algorithms/test_distillation.py::test_no_gradient_to_teacher_or_advantage",
    ),
    SeededBug(
        name="a server's scores one token late",
        file="megatron_gspo/loop/teachers.py",
        before="= scored.log_probs[predicted.packed]",
        after="= np.roll(scored.log_probs, 1)[predicted.packed]",
        test=(
            "tests/loop/test_teachers.py::test_every_rank_has_the_scores_although_a_server_is_down"
        ),
    ),
    SeededBug(
        name="the teacher's ids of the token before",
        file="megatron_gspo/mcore/forward_step.py",
        before="further = [*top_ids]",
        after="further = [ids.roll(1, 0) for ids in top_ids]",
        test=(
            "tests/equivalence/test_layouts.py"
            "::test_other_objectives_and_cuts[tp1-pp1-cp1-dp1-ep1-etp1]"
        ),
    ),
    SeededBug(
        name="log-probs of several ids: the softmax gets the gradient of the first",
        file="megatron_gspo/parallel/log_probs.py",
        before="constant = grad_log_probs.sum(1) * -scale",
        after="constant = grad_log_probs[:, 0] * -scale",
        test="tests/parallel/test_log_probs.py::test_matches_log_softmax",
    ),
    SeededBug(
        name="the KL over the vocabulary: the teacher's sums of tiles keep their own maxima",
        file="megatron_gspo/parallel/teacher_tiles.py",
        before="shift = of_policy - of_teacher",
        after="shift = of_policy",
        test="tests/parallel/test_divergence.py::test_against_float64",
    ),
    SeededBug(
        name="the gradient of the reverse KL is not centred",
        file="megatron_gspo/parallel/log_probs.py",
        before="teacher.log_total - saved.log_total - teacher.reverse",
        after="teacher.log_total - saved.log_total",
        test=(
            "tests/parallel/test_divergence.py::test_the_gradient_is_that_of_the_kl_by_enumeration"
        ),
    ),
    SeededBug(
        name="the teacher's hidden states of the token before",
        file="megatron_gspo/mcore/teacher_states.py",
        before="self.hidden[micro_batch].to(compute_device(), non_blocking=True)",
        after="self.hidden[micro_batch].roll(1, 0).to(compute_device(), non_blocking=True)",
        test="tests/mcore/test_teacher_scores.py::test_scores_are_those_of_transformers[1]",
    ),
    SeededBug(
        name="all prompts have the first teacher",
        file="megatron_gspo/loop/teachers.py",
        before="self._chosen[batch.table['prompt_index']]",
        after="0 * self._chosen[batch.table['prompt_index']]",
        test="tests/loop/test_distillation.py::test_metrics_of_each_teacher",
    ),
)
