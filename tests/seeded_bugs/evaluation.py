"""Bugs of the evaluation: its estimators, what is kept, and what is continued."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

EVALUATION = (
    SeededBug(
        name="pass@k is that of independent draws",
        file="megatron_gspo/rollout/pass_at_k.py",
        before="math.comb(n - c, k) / math.comb(n, k)",
        after="(1.0 - c / n) ** k",
        test="tests/rollout/test_pass_at_k.py::test_by_hand",
    ),
    SeededBug(
        name="a response without a score counts as an average one",
        file="tools/evaluate/task_scores.py",
        before="np.nan_to_num(rewards, nan=0.0)",
        after="np.where(np.isnan(rewards), np.nanmean(rewards), rewards)",
        test="tests/tools/evaluate/test_task_scores.py::test_scores_by_hand",
    ),
    SeededBug(
        name="differences of models are not paired",
        file="tools/evaluate/task_scores.py",
        before="bootstrap_interval(own - first)",
        after="bootstrap_interval(own - first[::-1])",
        test="tests/tools/evaluate/test_task_scores.py::test_differences_are_paired",
    ),
    SeededBug(
        name="held-out responses are scored like those of training",
        file="megatron_gspo/loop/training_loop.py",
        before="evaluate(run.eval_groups, run.eval_rewards,",
        after="evaluate(run.eval_groups, run.rewards,",
        test=("tests/train/test_judges.py::test_a_source_for_a_ranking_and_one_for_a_reward_model"),
    ),
    SeededBug(
        name="what a kill left of a prompt stays in the file",
        file="tools/evaluate/response_file.py",
        before="self._file.truncate(end)",
        after="pass",
        test="tests/tools/evaluate/test_response_file.py::test_a_file_that_is_cut_anywhere_is_continued",
    ),
    SeededBug(
        name="responses of other settings are continued",
        file="tools/evaluate/response_file.py",
        before="if found.get(key) != settings.get(key):",
        after="if key not in found:",
        test="tests/tools/evaluate/test_response_file.py::test_responses_of_other_settings_are_refused",
    ),
)
