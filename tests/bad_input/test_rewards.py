"""Verifiers that can't be loaded, fail on everything, or fail on some responses: named, or
counted and left out.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bad_input.test_rollouts import MyEngine
from tests.support.command_line import Case, check, small_config, start, with_engine
from tests.support.training_runs import records

ALL = "responses of a batch (the first: "


def body(code: str, name: str = "score"):
    """A verifier file with this text and the config that names it."""

    def write(config, folder):
        (folder / "verify.py").write_text(code)
        config["data"]["verifier"] = f"{folder}/verify.py:{name}"

    return write


def returns(value: str):
    return body(f"def score(text, prompt):\n    return {value}\n")


def in_a_process(write, seconds: float = 1.0):
    """The same in a worker process with a time limit, for one prompt's two responses: a
    worker's start takes time.
    """

    def change(config, folder):
        write(config, folder)
        config["rollout"] |= {"rollout_batch_size": 1, "n_samples_per_prompt": 2}
        config["training"]["global_batch_size"] = 2
        config["data"]["verifier_timeout"] = seconds

    return change


def fails_on_all(name, first, overrides=(), *, breaks, shows=()):
    """A case in which no response of the batch gets a score; ``first`` is the first one's
    reason.
    """
    return Case(name, ALL, overrides, breaks, (ALL + first, *shows))


CASES = (
    Case("unknown verifier", "is not a verifier; set one of exact_match", ("data.verifier=regex",)),
    Case(
        "verifier file missing",
        "no such file: absent.py; give its path, then :function",
        ("data.verifier=absent.py:score",),
    ),
    Case(
        "verifier file that fails",
        "); fix it",
        breaks=body("import absent\n"),
        shows=("verify.py failed (ModuleNotFoundError: No module named 'absent'", "running "),
    ),
    Case(
        "verifier file that fails in a worker",
        "the verifier could not be loaded: ",
        shows=("No module named 'absent'",),
        breaks=in_a_process(body("import absent\n")),
    ),
    Case(
        "unknown option of a verifier",
        "don't fit (",
        ("data.verifier=exact_match", "data.verifier_options={tolerance: 1}"),
    ),
    fails_on_all("verifier that raises", "error: ZeroDivisionError", breaks=returns("1 / 0")),
    fails_on_all(
        "verifier that hangs",
        "timeout: no result after 0.1 s",
        breaks=in_a_process(body("import time\ndef score(t, p): time.sleep(600)\n"), 0.1),
    ),
    fails_on_all(
        "answers missing for exact_match",
        "error: ValueError: prompt",
        ("data.verifier=exact_match", "data.answer_key=other"),
        shows=("has no answer",),
        breaks=lambda config, folder: (folder / "prompts.jsonl").write_text(
            "".join(json.dumps({"prompt": f"Spell {i}", "other": None}) + "\n" for i in range(4))
        ),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verifier(case, model, tmp_path):
    config = small_config(model, tmp_path)
    if case.breaks:
        case.breaks(config, tmp_path)
    check(case, start(config, tmp_path, *case.overrides))


FAILS_ON_LONG_TEXTS = """
def score(text, prompt):
    if len(text) >= 2: 1 / 0
    return 1.0 - len(text)
"""


def samples_of(config: dict) -> list[dict]:
    lines = (Path(config["run_dir"]) / "samples" / "step_000001.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_some_failures_are_counted_and_move_no_baseline(model, tmp_path):
    """Rewards 1, 0 and two failures a group: the mean is 0.5 and not 0.25, and the failures
    aren't trained on.
    """
    config = small_config(model, tmp_path, tracking={"samples_per_step": 8, "plot": False})
    body(FAILS_ON_LONG_TEXTS)(config, tmp_path)
    done = with_engine(config, MyEngine())
    row = records(config["run_dir"])[-1]
    assert done.code == 0 and "step 1: 4 of 8 responses could not be scored" in done.text
    assert row["verifier/error"] == 4 and row["masked/unscored"] == 4
    assert row["reward/mean"] == 0.5
    rewards = [sample["reward"] for sample in samples_of(config)]
    assert rewards == [1.0, 0.0, None, None] * 2
    # on-policy, A = (1, 0) - 0.5 over 0.7071: their mean is 0; N is 4, so that the loss isn't
    # halved
    assert row["loss/policy"] == pytest.approx(0.0, abs=1e-6)
    assert samples_of(config)[2]["metadata"]["verifier_failure"].startswith("error: ")


def test_a_failure_can_be_given_a_reward(model, tmp_path):
    config = small_config(model, tmp_path, tracking={"samples_per_step": 8, "plot": False})
    body(FAILS_ON_LONG_TEXTS)(config, tmp_path)
    config["data"]["verifier_failure_reward"] = -1.0
    assert with_engine(config, MyEngine()).code == 0
    row = records(config["run_dir"])[-1]
    assert row["verifier/error"] == 4 and row["masked/unscored"] == 0
    assert row["reward/mean"] == (1 + 0 - 1 - 1) / 4
    assert [sample["reward"] for sample in samples_of(config)] == [1.0, 0.0, -1.0, -1.0] * 2


def test_a_verifier_may_print_and_fork(model, tmp_path):
    """What it prints is not part of the protocol; a forked copy of it sends no results."""
    config = small_config(model, tmp_path, tracking={"samples_per_step": 8, "plot": False})
    code = (
        "import os, sys\ndef score(text, prompt):\n    print('x' * 100000)\n    os.fork()\n   "
        " return len(text)\n"
    )
    body(code)(config, tmp_path)
    config["data"]["verifier_timeout"] = 20.0
    assert with_engine(config, MyEngine()).code == 0
    assert [sample["reward"] for sample in samples_of(config)] == [0, 1, 2, 3] * 2
    row = records(config["run_dir"])[-1]
    assert not [name for name in row if name.startswith("verifier/") and row[name]]
