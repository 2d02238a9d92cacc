"""The examples with real packages: what the policy writes is trained as it was drawn, in one row,
and the reward arrives."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_gspo.agents.agent_host import AgentHost, RunRequest
from megatron_gspo.agents.agent_run import RunLimits
from megatron_gspo.agents.endpoint import AgentEndpoint
from megatron_gspo.agents.function_program import FunctionProgram
from megatron_gspo.agents.players import ProgramPlayer
from megatron_gspo.agents.rendering import TemplateRendering
from megatron_gspo.agents.runner import CLIENT_ENV
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.rewards.scorer import FAILURE
from tests.support.agent_endpoint import TOKENIZER, call_text, in_event_loop
from tests.support.scripted_generator import Script, ScriptedGenerator, log_prob_sizes

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = {  # of the examples that have one of their own
    "verifiers_task": "verifiers",
    "nemo_gym_servers": "nemo_gym",
    "harbor_trial": "harbor",
}
CALCULATORS = ("openai_agents", "langgraph_agent", "verifiers_task")


def task(text: str, answer: str = "", **metadata: Any) -> Prompt:
    return Prompt(0, np.array([5, 6]), text, answer, metadata)


async def played(
    environments: Path,
    example: str,
    script: Script,
    prompt: Prompt,
    env: Mapping[str, str] | None = None,
    **limits: int,
) -> tuple[Sample, ScriptedGenerator]:
    """The sample of a run of an example in the packages' environment, and who has drawn it."""
    environment = environments / ENVIRONMENTS.get(example, "")
    common = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    program = FunctionProgram(
        f"{ROOT}/examples/agents/{example}.py:run",
        CLIENT_ENV | common | dict(env or {}),
        run_timeout=1100.0,
        python=f"{environment}/bin/python",
    )
    endpoint = AgentEndpoint(TemplateRendering(TOKENIZER, [TOKENIZER.eos_token_id]))
    host = AgentHost(endpoint, ProgramPlayer(program), RunLimits(**limits), concurrent_runs=1)
    generator = ScriptedGenerator(TOKENIZER, script)
    request = RunRequest(prompt, 0, seed=1)
    try:
        [sample] = await host.samples([request], generator, max_call_length=200)
    finally:
        await host.close()
    return sample, generator


def trained_tokens(sample: Sample) -> list[int]:
    return sample.tokens[sample.prompt_length :][sample.loss_mask].tolist()


def drawn_tokens(generator: ScriptedGenerator) -> list[int]:
    return np.concatenate([call.tokens for call in generator.calls]).tolist()


def check_row(sample: Sample, generator: ScriptedGenerator, calls: int) -> None:
    """All replies are one row, and stand in it as they were drawn."""
    assert FAILURE not in sample.metadata, sample.metadata[FAILURE]
    assert len(generator.calls) == calls
    last = generator.calls[-1]
    assert sample.row_lengths.tolist() == [len(sample.tokens)]
    assert sample.tokens.tolist() == [*last.prompt.tolist(), *last.tokens.tolist()]
    assert trained_tokens(sample) == drawn_tokens(generator)
    sizes = [log_prob_sizes(call.prompt, call.tokens) for call in generator.calls]
    log_probs = sample.rollout_log_probs[sample.loss_mask]
    assert log_probs.tolist() == (-np.concatenate(sizes)).tolist()


def calculates(prompt: str, seed: int) -> str:
    """(17 + 25) * 3 in two calls, the first with reasoning; then the answer."""
    results = prompt.count("<tool_response>")
    if results == 0:
        first = call_text("calculate", left=17, operator="+", right=25)
        return f"<think>\nThe sum first.\n</think>\n\nI begin.\n{first}"
    if results == 1:
        assert "<tool_response>\n42\n</tool_response>" in prompt
        return call_text("calculate", left=42, operator="*", right=3)
    assert "<tool_response>\n126\n</tool_response>" in prompt
    return "It is 126."


@pytest.mark.parametrize("example", CALCULATORS)
@in_event_loop
async def test_a_calculator_is_used(environments: Path, example: str) -> None:
    sample, generator = await played(
        environments, example, calculates, task("(17 + 25) * 3?", "126")
    )
    check_row(sample, generator, calls=3)
    assert sample.reward == 1.0


@pytest.mark.parametrize("example", CALCULATORS)
@in_event_loop
async def test_what_a_policy_does_wrong_is_worth_nothing(environments: Path, example: str) -> None:
    """Arguments without sense, then a tool that does not exist, until a limit ends the run."""

    def errs(prompt: str, seed: int) -> str:
        if "<tool_response>" not in prompt:
            return call_text("calculate", left="seven")
        return call_text("compute", left=7)

    sample, generator = await played(environments, example, errs, task("7?", "7"), max_calls=4)
    check_row(sample, generator, calls=len(generator.calls))
    assert 2 <= len(generator.calls) <= 4
    assert sample.reward == 0.0


@in_event_loop
async def test_each_turn_of_smolagents_is_a_row(environments: Path) -> None:
    """It repeats calls and results as text; all rows are trained with one reward."""

    def calculates_until_the_end(prompt: str, seed: int) -> str:
        if prompt.count("Observation:\n126") > 0:
            return call_text("final_answer", answer="126")
        if prompt.count("Observation:\n42") > 0:
            return call_text("calculate", left=42, operator="*", right=3)
        return call_text("calculate", left=17, operator="+", right=25)

    sample, generator = await played(
        environments, "smolagents_tools", calculates_until_the_end, task("(17 + 25) * 3?", "126")
    )
    assert FAILURE not in sample.metadata, sample.metadata[FAILURE]
    assert sample.num_rows == len(generator.calls) == 3
    assert trained_tokens(sample) == drawn_tokens(generator)
    assert sample.reward == 1.0


SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
WRITE = task("Write 42 to answer.txt.", test="grep -qx 42 answer.txt")


@in_event_loop
async def test_mini_swe_agent_works_in_the_directory_of_its_run(environments: Path) -> None:
    def writes(prompt: str, seed: int) -> str:
        if "<tool_response>" in prompt:
            return call_text(command=SUBMIT)
        return "<think>\nA file.\n</think>\n\nI write it.\n" + call_text(
            command="echo 42 > answer.txt"
        )

    sample, generator = await played(environments, "mini_swe_agent", writes, WRITE)
    check_row(sample, generator, calls=2)
    assert sample.reward == 1.0


@in_event_loop
async def test_mini_swe_agent_leaves_out_a_reply_without_a_command(environments: Path) -> None:
    """The reply stays a row, which is trained with the others of the run."""

    def talks_first(prompt: str, seed: int) -> str:
        return call_text(command=SUBMIT) if "Tool call error" in prompt else "I will."

    sample, generator = await played(environments, "mini_swe_agent", talks_first, WRITE)
    assert FAILURE not in sample.metadata, sample.metadata[FAILURE]
    assert sample.num_rows == len(generator.calls) == 2
    assert trained_tokens(sample) == drawn_tokens(generator)
    assert sample.reward == 0.0


@in_event_loop
async def test_mini_swe_agent_ends_at_a_limit(environments: Path) -> None:
    """It does not try again, and what it has done until then counts."""

    def writes_again(prompt: str, seed: int) -> str:
        return call_text(command="echo 42 > answer.txt")

    sample, generator = await played(
        environments, "mini_swe_agent", writes_again, WRITE, max_calls=2
    )
    check_row(sample, generator, calls=2)
    assert sample.reward == 1.0


@pytest.fixture
def environment_url(environments: Path) -> Iterator[str]:
    """Of the example's server of OpenEnv."""
    command = [
        f"{environments}/bin/python",
        *("-m", "uvicorn", "--port", "0", "--app-dir", f"{ROOT}/examples/agents"),
        "openenv_number:app",
    ]
    server = subprocess.Popen(
        command, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True
    )
    assert server.stderr is not None
    try:
        addresses = (re.search(r"running on (http://[\d.:]+)", line) for line in server.stderr)
        yield next(address[1] for address in addresses if address)
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize(("max_calls", "reward"), [(8, 1.0), (6, 0.0)])
@in_event_loop
async def test_an_environment_of_openenv_is_played(
    environments: Path, environment_url: str, max_calls: int, reward: float
) -> None:
    """The seventh guess is right. A limit of six ends the run without a reward."""

    def guesses(prompt: str, seed: int) -> str:
        low = 1
        high = 100
        for guess, hint in re.findall(r"I say (\d+)\..*?too (low|high)", prompt, re.DOTALL):
            if hint == "low":
                low = int(guess) + 1
            else:
                high = int(guess) - 1
        return f"Between {low} and {high} I say {(low + high) // 2}."

    sample, generator = await played(
        environments,
        "openenv_number",
        guesses,
        task("Guess the whole number from 1 to 100.", seed=7),
        {"ENVIRONMENT_URL": environment_url},
        max_calls=max_calls,
    )
    check_row(sample, generator, calls=min(max_calls, 7))
    assert sample.reward == reward


def function(name: str, **properties: Any) -> dict[str, Any]:
    """A tool as the responses API knows it."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    parameters["additionalProperties"] = False
    return {
        "type": "function",
        "name": name,
        "description": "",
        "parameters": parameters,
        "strict": True,
    }


VALUES = {"type": "array", "items": {"type": "integer"}}
SYNONYMS = task(
    "Extract.",
    id=0,
    expected_synonyms=["Hot"],
    expected_synonym_values=[299],
    minefield_label="Warm",
    minefield_label_value=407,
    responses_create_params={
        "input": [{"role": "user", "content": "Extract the value of the synonym Hot."}],
        "tools": [
            function("get_synonym_value", synonym={"type": "string"}),
            function("extract_synonym_values", synonym_values=VALUES),
        ],
    },
)


@in_event_loop
async def test_tools_of_nemo_gym_are_used(environments: Path) -> None:
    def extracts(prompt: str, seed: int) -> str:
        results = prompt.count("<tool_response>")
        if results == 0:
            call = call_text("get_synonym_value", synonym="Hot")
            return f"<think>\nThe value first.\n</think>\n\nI begin.\n{call}"
        if results == 1:
            assert '{"synonym_value":299}' in prompt
            return call_text("extract_synonym_values", synonym_values=[299])
        return "It is done."

    sample, generator = await played(environments, "nemo_gym_servers", extracts, SYNONYMS)
    check_row(sample, generator, calls=3)
    assert sample.reward == 1.0


@in_event_loop
async def test_a_run_of_nemo_gym_that_talks_on_is_worth_nothing(environments: Path) -> None:
    """It calls a tool that does not exist, until a limit ends the run."""

    def errs(prompt: str, seed: int) -> str:
        return call_text("compute", left=7)

    sample, generator = await played(environments, "nemo_gym_servers", errs, SYNONYMS, max_calls=2)
    check_row(sample, generator, calls=2)
    assert sample.reward == 0.0


@pytest.fixture
def harbor_task(tmp_path: Path) -> Prompt:
    """A task of Harbor: 42 in a file."""
    files = {
        "instruction.md": "Write 42 to answer.txt.",
        "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 200.0\n[verifier]\ntimeout_sec = 60.0\n',
        "environment/Dockerfile": "FROM scratch\n",
        "tests/test.sh": "echo 0 > $ROOT/logs/verifier/reward.txt\n"
        "grep -qx 42 $ROOT/app/answer.txt && echo 1 > $ROOT/logs/verifier/reward.txt\n",
    }
    for name, text in files.items():
        file = tmp_path / "answer" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    environment = {"import_path": "tests.agent_packages.local_environment:LocalEnvironment"}
    return task("answer", task=str(tmp_path / "answer"), environment=environment)


@pytest.mark.parametrize(("max_calls", "reward"), [(8, 1.0), (1, 0.0)])
@in_event_loop
async def test_a_trial_of_harbor(
    environments: Path, harbor_task: Prompt, max_calls: int, reward: float
) -> None:
    """Terminus 2 asks whether the task is complete."""

    def writes(prompt: str, seed: int) -> str:
        turn = prompt.count("<|im_start|>assistant")
        commands = [{"keystrokes": "echo 42 > answer.txt\n", "duration": 0.1}]
        return json.dumps(
            {
                "analysis": "A file is missing.",
                "plan": "I write it.",
                "commands": commands if turn == 2 else [],
                "task_complete": turn > 2,
            }
        )

    sample, generator = await played(
        environments, "harbor_trial", writes, harbor_task, max_calls=max_calls
    )
    check_row(sample, generator, calls=len(generator.calls))
    assert sample.reward == reward
