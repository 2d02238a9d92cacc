"""Bugs of the evaluation: its estimators, what is kept, and what is continued."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

EVALUATE, TESTS = "tools/evaluate", "tests/tools/evaluate"
ELO, SCORES = f"{EVALUATE}/elo.py", f"{EVALUATE}/task_scores.py"
ENGINES, KEPT = f"{EVALUATE}/response_engines.py", f"{EVALUATE}/response_file.py"
BY_HAND = f"{TESTS}/test_task_scores.py::test_scores_by_hand"

EVALUATION = (
    SeededBug(
        "pass@k is that of independent draws", "several trainers", "megatron_gspo/rollout/pass_at_k.py",
        "1.0 - math.comb(n - c, k) / math.comb(n, k)", "1.0 - (1.0 - c / n) ** k",
        ("tests/rollout/test_pass_at_k.py::test_by_hand", BY_HAND),
    ),
    SeededBug(
        "a rating in nats for one in base 10", "design", ELO,
        "SCALE = 400.0 / math.log(10.0)", "SCALE = 400.0",
        (f"{TESTS}/test_elo.py::test_expected_scores_are_the_published_ones",),
    ),
    SeededBug(
        "the interval of a rating has half its width", "design", ELO,
        "half = _NORMAL_QUANTILE / math.sqrt(curvature)", "half = _NORMAL_QUANTILE / math.sqrt(curvature) / 2",
        (f"{TESTS}/test_elo.py::test_the_interval_has_the_true_rating_as_often_as_it_says",),
    ),
    SeededBug(
        "a rating without its prior", "this project", ELO,
        " - (rating - PRIOR_MEAN) / PRIOR_STD**2\n", "\n",
        (f"{TESTS}/test_elo.py::test_the_published_formula_by_a_search_over_all_ratings",),
    ),
    SeededBug(
        "problems whose file lacks tests are scored", "this project", f"{EVALUATE}/layouts.py",
        '    if row.get("official_tests_complete") is False:\n        raise LeftOut("incomplete tests")\n', "",
        (f"{TESTS}/test_layouts.py::test_what_outputs_cannot_decide_is_left_out",),
    ),
    SeededBug(
        "a response without a score counts as an average one", "several trainers", SCORES,
        "np.nan_to_num(found, nan=0.0)", "np.where(np.isnan(found), np.nanmean(found), found)",
        (BY_HAND,),
    ),
    SeededBug(
        "differences of models are not paired", "design", SCORES,
        "bootstrap_interval(own - first)", "bootstrap_interval(own - first[::-1])",
        (f"{TESTS}/test_task_scores.py::test_differences_are_paired",),
    ),
    SeededBug(
        "the prompts that a kill left are decoded in other batches", "design", ENGINES,
        "        ordered = sorted(prompts, key=lambda prompt: (prompt.length, prompt.index))\n",
        "        ordered = sorted([prompt for prompt in prompts if prompt.index not in done],\n"
        "                         key=lambda prompt: (prompt.length, prompt.index))\n",
        (f"{TESTS}/test_response_engines.py::test_chunks_give_what_one_call_gives",),
    ),
    SeededBug(
        "what a kill left of a prompt stays in the file", "several trainers", KEPT,
        "            self._file.truncate(end)\n", "",
        (f"{TESTS}/test_response_file.py::test_a_file_that_is_cut_anywhere_is_continued",),
    ),
    SeededBug(
        "responses of other settings are continued", "several trainers", KEPT,
        "            if found.get(key) != settings.get(key):\n", "            if key not in found:\n",
        (f"{TESTS}/test_response_file.py::test_responses_of_other_settings_are_refused",),
    ),
    SeededBug(
        "servers are asked for their version one after the other", "this project", ENGINES,
        "await asyncio.gather(*(ask(server) for server in servers))", "[await ask(server) for server in servers]",
        (f"{TESTS}/test_response_engines.py::test_servers_are_asked_for_their_version_at_the_same_time",),
    ),
    SeededBug(
        "the end of the window is a day late", "design", f"{EVALUATE}/task_files.py",
        "(last is not None and date > last)", "(last is not None and date.date() > last.date())",
        (f"{TESTS}/test_task_files.py::test_a_window_of_dates",),
    ),
    SeededBug(
        "the evaluation has a seed of its own", "design", f"{EVALUATE}/run_tasks.py",
        "evaluation_seed(config.seed)\n", "config.seed\n",
        (f"{TESTS}/test_run_tasks.py::test_aime",),
    ),
)  # fmt: skip
