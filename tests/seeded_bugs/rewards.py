"""Bugs of rewards: what a program can reach, what is left of it, how it is judged, and what a
judge or a reward model is taken to have said.
"""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

REWARDS = (
    SeededBug(
        name="the network is left on",
        file="megatron_gspo/rewards/sandbox/launcher.py",
        before="kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET)",
        after="kernel.unshare(kernel.CLONE_NEWNS)",
        test="tests/rewards/sandbox/test_isolation.py::test_an_isolation_has_all_guarantees",
    ),
    SeededBug(
        name="programs have no memory limit",
        file="megatron_gspo/rewards/sandbox/kernel.py",
        before="'as': (limits.memory_bytes, limits.memory_bytes), ",
        after="",
        test="tests/rewards/sandbox/test_launcher.py::test_the_limits_are_those_of_the_command",
    ),
    SeededBug(
        name="what a program leaves is not reaped",
        file="megatron_gspo/rewards/sandbox/launcher.py",
        before="usage.ru_stime + _end_children()",
        after="usage.ru_stime",
        test="tests/rewards/sandbox/test_launcher.py::test_nothing_is_left_of_a_program",
    ),
    SeededBug(
        name="all of /usr is visible",
        file="megatron_gspo/rewards/sandbox/isolation.py",
        before="('/usr/bin', ",
        after="('/usr', ",
        test="tests/rewards/sandbox/test_isolation.py::test_applications_below_usr_are_not_visible",
    ),
    SeededBug(
        name="a sandbox that fails gives a reward of 0",
        file="megatron_gspo/rewards/sandbox/fusion_client.py",
        before="raise SandboxError(f'{self._url}: {reason}')",
        after="return Outcome('exit', 1, b'')",
        test="tests/rewards/sandbox/test_code_verifier.py::test_failures_are_counted_and_have_no_reward",
    ),
    SeededBug(
        name="a program that fails after the right output passes",
        file="megatron_gspo/rewards/sandbox/code_verifier.py",
        before="if outcome.code != 0:",
        after="if False:",
        test="tests/rewards/sandbox/test_fusion_client.py::test_verdicts",
    ),
    SeededBug(
        name="one visible test decides",
        file="megatron_gspo/rewards/sandbox/code_verifier.py",
        before="float(passed == count)",
        after="float(passed >= 1)",
        test="tests/rewards/sandbox/test_code_verifier.py::test_scores",
    ),
    SeededBug(
        name="integers are compared as floats",
        file="megatron_gspo/rewards/sandbox/output_comparison.py",
        before="Decimal(token.decode()) == Decimal(expected.decode())",
        after="float(token) == float(expected)",
        test="tests/rewards/sandbox/test_output_comparison.py::test_text",
    ),
    SeededBug(
        name="a data file runs code",
        file="megatron_gspo/rewards/sandbox/case_formats.py",
        before="_TextOnly(io.BytesIO(content)).load()",
        after="pickle.loads(content)",
        test="tests/rewards/sandbox/test_case_formats.py::test_a_pickle_runs_nothing",
    ),
    SeededBug(
        name="programs run with less isolation than required",
        file="megatron_gspo/rewards/sandbox/sandboxes.py",
        before="if config.require_isolation and isolation.missing:",
        after="if False:",
        test=(
            "tests/rewards/sandbox/test_sandboxes.py::test_less_isolation_than_required_is_refused"
        ),
    ),
    SeededBug(
        name="a ranking is reversed",
        file="megatron_gspo/rewards/judge.py",
        before="(last - rank) / last",
        after="rank / last",
        test="tests/rewards/test_judge.py::test_scores_of_a_ranking_by_hand",
    ),
    SeededBug(
        name="the answer to another prompt is taken from the cache",
        file="megatron_gspo/rewards/judge_servers.py",
        before="json.dumps(body, sort_keys=True)",
        after="json.dumps(body['messages'][-1]['content'].rpartition('# ')[2])",
        test=(
            "tests/rewards/test_judge.py::"
            "test_the_same_request_is_asked_once_and_another_prompt_is_another_request"
        ),
    ),
    SeededBug(
        name="a judge that is down gives a reward of 0",
        file="megatron_gspo/rewards/judge.py",
        before="rewards[i] = answer if isinstance(answer, JudgeError)",
        after="rewards[i] = 0.0 if isinstance(answer, JudgeError)",
        test=(
            "tests/rewards/test_judge.py::"
            "test_a_judge_that_is_down_leaves_responses_out_within_the_limit"
        ),
    ),
    SeededBug(
        name="a reward model scores the pad tokens",
        file="megatron_gspo/rewards/reward_model.py",
        before="self._model.config.pad_token_id = self._tokenizer.pad_token_id",
        after="self._model.config.pad_token_id = -1",
        test=(
            "tests/rewards/test_reward_model.py::test_the_score_is_that_of_the_conversation_alone"
        ),
    ),
    SeededBug(
        name="the examples' reward model does not see where a response begins",
        file="examples/reward_model/train.py",
        before="self.tokenizer.chat_template = TEMPLATE",
        after="pass",
        test=(
            "tests/examples/test_reward_model.py::"
            "test_the_verifier_gives_the_logits_of_the_training"
        ),
    ),
    SeededBug(
        name="every rank keeps a worker for a verifier that one rank calls",
        file="megatron_gspo/loop/reward_scoring.py",
        before="self.scorer.release()",
        after="pass",
        test="tests/loop/test_reward_scoring.py::test_only_the_rank_that_scores_a_batch_has_a_worker",
    ),
)
