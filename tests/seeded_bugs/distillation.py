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
        before="= scores[predicted.packed]",
        after="= np.roll(scores, 1)[predicted.packed]",
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
)
