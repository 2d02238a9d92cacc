"""Bugs of the code verifier: what a program can reach, what is left of it, and how it is judged."""

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
)
