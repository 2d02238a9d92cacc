"""Bugs of the sandbox: what a program can reach, what is left of it, and how it is scored."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

SANDBOX, TESTS = "megatron_gspo/rewards/sandbox", "tests/rewards/sandbox"
BUBBLEWRAP, LAUNCHER, KERNEL = f"{SANDBOX}/bubblewrap.py", f"{SANDBOX}/launcher.py", f"{SANDBOX}/kernel.py"
VERIFIER = f"{SANDBOX}/code_verifier.py"
COMPARISON = f"{SANDBOX}/output_comparison.py"
LIMITS = f"{TESTS}/test_launcher.py::test_the_limits_are_those_of_the_command"
ISOLATION = f"{TESTS}/test_isolation.py::test_an_isolation_has_all_guarantees"

OF_THE_SANDBOX = (
    SeededBug(
        "the network is left on", "design", LAUNCHER,
        "kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET)", "kernel.unshare(kernel.CLONE_NEWNS)",
        (ISOLATION,),
    ),
    SeededBug(
        "programs have no memory limit", "several trainers", KERNEL,
        '        "as": (limits.memory_bytes, limits.memory_bytes),\n', "",
        (LIMITS,),
    ),
    SeededBug(
        "the limit of processes is another", "design", BUBBLEWRAP,
        "*_prlimit(command.limits, command.limits.processes)", "*_prlimit(command.limits, 64)",
        (LIMITS,),
    ),
    SeededBug(
        "output and files are unlimited", "several trainers", KERNEL,
        '        "fsize": (limits.disk_bytes, limits.disk_bytes),\n', "",
        (LIMITS,),
    ),
    SeededBug(
        "the expected output is sent with the input", "design", VERIFIER,
        "outcome = program(case.stdin)", "outcome = program(case.stdin + str(case.accepted[0]))",
        (f"{TESTS}/test_fusion_client.py::test_the_request_has_the_limits_and_no_expected_output",),
    ),
    SeededBug(
        "what a program leaves is not reaped", "design", LAUNCHER,
        " + usage.ru_stime + _end_children()\n",
        " + usage.ru_stime\n",
        (f"{TESTS}/test_launcher.py::test_nothing_is_left_of_a_program",),
    ),
    SeededBug(
        "empty files are unlimited", "design", LAUNCHER,
        "nr_inodes={inodes}", "nr_inodes=0",
        (f"{TESTS}/test_file_system.py::test_the_number_of_files_is_limited",),
    ),
    SeededBug(
        "all of /usr is visible", "design", f"{SANDBOX}/isolation.py",
        '    "/usr/bin",\n', '    "/usr",\n',
        (f"{TESTS}/test_isolation.py::test_applications_below_usr_are_not_visible",),
    ),
    SeededBug(
        "redirects are followed", "design", f"{SANDBOX}/fusion_client.py",
        "urllib.request.ProxyHandler({}), _NoRedirects", "urllib.request.ProxyHandler({})",
        (f"{TESTS}/test_fusion_client.py::test_a_redirect_is_not_followed",),
    ),
    SeededBug(
        "the last fence is the program", "several trainers", f"{SANDBOX}/languages.py",
        "for candidates in (labelled, programs, plain):", "for candidates in (labelled + plain,):",
        (f"{TESTS}/test_languages.py::test_the_last_complete_block_counts",),
    ),
    SeededBug(
        "the first element of a list passes", "several trainers", f"{SANDBOX}/case_formats.py",
        "return all(len(output) == 1 for output", "return all(True for output",
        (f"{TESTS}/test_case_formats.py::test_a_list_of_one_value_may_be_the_value",),
    ),
    SeededBug(
        "a sandbox that fails gives a reward of 0", "several trainers", VERIFIER,
        "    outcome = program(case.stdin)\n",
        "    try:\n        outcome = program(case.stdin)\n    except SandboxError:\n        return \"runtime_error\"\n",
        (f"{TESTS}/test_code_verifier.py::test_failures_are_counted_and_have_no_reward",),
    ),
    SeededBug(
        "a program that fails after the right output passes", "several trainers", VERIFIER,
        "    if outcome.code != 0:\n", "    if False:\n",
        (f"{TESTS}/test_fusion_client.py::test_verdicts",),
    ),
    SeededBug(
        "one visible test decides", "several trainers", VERIFIER,
        "float(passed == count)", "float(passed >= 1)",
        (f"{TESTS}/test_code_verifier.py::test_scores",),
    ),
    SeededBug(
        "integers are compared as floats", "design", COMPARISON,
        "Decimal(token.decode()) == Decimal(expected.decode())", "float(token) == float(expected)",
        (f"{TESTS}/test_output_comparison.py::test_text",),
    ),
    SeededBug(
        "a data file runs code", "several trainers", f"{SANDBOX}/case_formats.py",
        "unpickled = _TextOnly(io.BytesIO(content)).load()", "unpickled = pickle.loads(content)",
        (f"{TESTS}/test_case_formats.py::test_a_pickle_runs_nothing",),
    ),
    SeededBug(
        "a server that fails is asked for ever", "design", f"{SANDBOX}/fusion_client.py",
        "            self._breaker.record(False)\n", "",
        (f"{TESTS}/test_fusion_client.py::test_a_server_that_fails_is_left_alone",),
    ),
    SeededBug(
        "programs run with less isolation than required", "design", f"{SANDBOX}/sandboxes.py",
        "if config.require_isolation and isolation.missing:", "if False:",
        (f"{TESTS}/test_sandboxes.py::test_less_isolation_than_required_is_refused",),
    ),
)  # fmt: skip
