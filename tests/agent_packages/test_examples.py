"""The examples with real packages: what the policy writes is trained as it was drawn, in one row,
and the reward arrives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_gspo.agents.agent_host import AgentHost, RunRequest
from megatron_gspo.agents.agent_run import RunLimits
from megatron_gspo.agents.endpoint import AgentEndpoint
from megatron_gspo.agents.players import ProgramPlayer
from megatron_gspo.agents.rendering import TemplateRendering
from megatron_gspo.agents.runner import AgentProgram
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.rewards.scorer import FAILURE
from tests.support.agent_endpoint import TOKENIZER, call_text, in_event_loop
from tests.support.scripted_generator import Script, ScriptedGenerator, log_prob_sizes

ROOT = Path(__file__).parents[2]
CALCULATORS = ("openai_agents", "langgraph_agent")


def task(text: str, answer: str = "", **metadata: str) -> Prompt:
    return Prompt(0, np.array([5, 6]), text, answer, metadata)


async def played(
    python: str, example: str, script: Script, prompt: Prompt, **limits: int
) -> tuple[Sample, ScriptedGenerator]:
    """The sample of a run of an example in the packages' environment, and who has drawn it."""
    command = (
        python,
        "-m",
        "megatron_gspo.agents.agent_function",
        f"{ROOT}/examples/agents/{example}.py:run",
        "{task_file}",
    )
    env = {"PYTHONPATH": str(ROOT), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    program = AgentProgram(command, env, run_timeout=270.0)
    endpoint = AgentEndpoint(TemplateRendering(TOKENIZER, [TOKENIZER.eos_token_id]))
    host = AgentHost(endpoint, ProgramPlayer(program), RunLimits(**limits), concurrent_runs=1)
    generator = ScriptedGenerator(TOKENIZER, script)
    request = RunRequest(prompt, 0, seed=1)
    try:
        [sample] = await host.samples([request], generator, max_call_length=200)
    finally:
        await host.close()
    return sample, generator


def check_row(sample: Sample, generator: ScriptedGenerator, calls: int) -> None:
    """All replies are one row, and stand in it as they were drawn."""
    assert FAILURE not in sample.metadata, sample.metadata[FAILURE]
    assert len(generator.calls) == calls
    last = generator.calls[-1]
    assert sample.row_lengths.tolist() == [len(sample.tokens)]
    assert sample.tokens.tolist() == [*last.prompt.tolist(), *last.tokens.tolist()]
    trained = sample.tokens[sample.prompt_length :][sample.loss_mask]
    assert trained.tolist() == np.concatenate([call.tokens for call in generator.calls]).tolist()
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
async def test_a_calculator_is_used(agents_python: str, example: str) -> None:
    sample, generator = await played(
        agents_python, example, calculates, task("(17 + 25) * 3?", "126")
    )
    check_row(sample, generator, calls=3)
    assert sample.reward == 1.0


@pytest.mark.parametrize("example", CALCULATORS)
@in_event_loop
async def test_what_a_policy_does_wrong_is_worth_nothing(agents_python: str, example: str) -> None:
    """Arguments without sense, then a tool that does not exist, until a limit ends the run."""

    def errs(prompt: str, seed: int) -> str:
        if "<tool_response>" not in prompt:
            return call_text("calculate", left="seven")
        return call_text("compute", left=7)

    sample, generator = await played(agents_python, example, errs, task("7?", "7"), max_calls=4)
    check_row(sample, generator, calls=len(generator.calls))
    assert 2 <= len(generator.calls) <= 4
    assert sample.reward == 0.0


SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
WRITE = task("Write 42 to answer.txt.", test="grep -qx 42 answer.txt")


@in_event_loop
async def test_mini_swe_agent_works_in_the_directory_of_its_run(agents_python: str) -> None:
    def writes(prompt: str, seed: int) -> str:
        if "<tool_response>" in prompt:
            return call_text(command=SUBMIT)
        return "<think>\nA file.\n</think>\n\nI write it.\n" + call_text(
            command="echo 42 > answer.txt"
        )

    sample, generator = await played(agents_python, "mini_swe_agent", writes, WRITE)
    check_row(sample, generator, calls=2)
    assert sample.reward == 1.0


@in_event_loop
async def test_mini_swe_agent_leaves_out_a_reply_without_a_command(agents_python: str) -> None:
    """The reply stays a row, which is trained with the others of the run."""

    def talks_first(prompt: str, seed: int) -> str:
        return call_text(command=SUBMIT) if "Tool call error" in prompt else "I will."

    sample, generator = await played(agents_python, "mini_swe_agent", talks_first, WRITE)
    assert FAILURE not in sample.metadata, sample.metadata[FAILURE]
    assert sample.num_rows == len(generator.calls) == 2
    trained = sample.tokens[sample.prompt_length :][sample.loss_mask]
    assert trained.tolist() == np.concatenate([call.tokens for call in generator.calls]).tolist()
    assert sample.reward == 0.0
