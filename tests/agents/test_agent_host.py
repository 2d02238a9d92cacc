"""Runs of a rank: their tasks, who scores them, and failures of the engine."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_gspo.agents.agent_host import AgentHost, RunRequest, single_error
from megatron_gspo.agents.agent_run import RunLimits
from megatron_gspo.agents.endpoint import AgentEndpoint
from megatron_gspo.agents.function_program import FunctionProgram
from megatron_gspo.agents.players import ProgramPlayer
from megatron_gspo.agents.rendering import TemplateRendering
from megatron_gspo.agents.run_verifier import RunVerifier
from megatron_gspo.agents.runner import AgentProgram, Program
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.errors import EngineError
from megatron_gspo.rewards.scorer import FAILURE, RewardScorer
from tests.support import stdlib_agent
from tests.support.agent_endpoint import TOKENIZER, in_event_loop
from tests.support.scripted_generator import ScriptedGenerator

AGENT = str(stdlib_agent.__file__)
ENV = {"OPENAI_BASE_URL": "{base_url}", "OPENAI_API_KEY": "{key}", "TASK": "{prompt}"}


def reply(prompt: str, seed: int) -> str:
    return f"reply {seed}"


def request(index: int = 0, sample: int = 0, **metadata: object) -> RunRequest:
    prompt = Prompt(index, np.array([5, 6]), f"task {index}", "yes", metadata)
    return RunRequest(prompt, sample, seed=1)


async def played(
    program: Program,
    *requests: RunRequest,
    verifier: str | None = None,
    generator=None,
    max_call_length: int = 40,
) -> list[Sample]:
    scorer = None if verifier is None else RewardScorer(verifier, timeout=None)
    host = AgentHost(
        AgentEndpoint(TemplateRendering(TOKENIZER, [TOKENIZER.eos_token_id])),
        ProgramPlayer(program),
        RunLimits(),
        concurrent_runs=2,
        verifier=None if scorer is None else RunVerifier(scorer),
    )
    try:
        return await host.samples(
            requests, generator or ScriptedGenerator(TOKENIZER, reply), max_call_length
        )
    finally:
        await host.close()


def program(*steps: str) -> AgentProgram:
    return AgentProgram((sys.executable, AGENT, *steps), ENV)


@in_event_loop
async def test_the_draws_of_a_run_depend_on_its_prompt_and_sample_alone() -> None:
    agent = program("call", "call", "reward=1")
    together = await played(agent, request(0), request(0, 1), request(1))
    alone = await played(agent, request(1))
    assert together[2].tokens.tolist() == alone[0].tokens.tolist()
    assert len({sample.text for sample in together}) == 3


@in_event_loop
async def test_a_function_is_an_agent(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    seen = tmp_path / "seen.json"
    file.write_text(
        "import dataclasses, json, sys\n"
        "import neighbour\n"
        "async def run(task):\n"
        "    assert sys.argv[1:] == []\n"
        "    from examples.agents.spell_backward import chat\n"
        "    chat(task, [{'role': 'user', 'content': task.prompt}])\n"
        f"    json.dump(dataclasses.asdict(task), open({str(seen)!r}, 'w'))\n"
        "    return neighbour.REWARD\n"
    )
    (tmp_path / "neighbour.py").write_text("REWARD = 0.5\n")
    agent = FunctionProgram(f"{file}:run", {}, run_timeout=60.0)
    [sample] = await played(agent, request(3, 1, level=[1, 2]))
    assert sample.reward == 0.5 and FAILURE not in sample.metadata
    task = json.loads(seen.read_text())
    assert (task["prompt"], task["answer"], task["metadata"]) == (
        "task 3",
        "yes",
        {"level": [1, 2]},
    )
    assert (task["index"], task["sample"], task["seed"]) == (3, 1, request(3, 1).run_seed)


@in_event_loop
async def test_a_function_that_can_t_be_loaded_is_named(tmp_path: Path) -> None:
    agent = FunctionProgram(f"{tmp_path}/agent.py:run", {}, run_timeout=60.0)
    [sample] = await played(agent, request())
    assert "exit code 1: agents.function = " in sample.metadata[FAILURE]
    assert "no such file" in sample.metadata[FAILURE]


VERIFIER = """
import pathlib
def score(text, prompt):
    messages = prompt.metadata["messages"]
    assert text == messages[-1]["content"] and messages[0]["content"] == prompt.text
    notes = pathlib.Path(prompt.metadata["directory"], "notes.txt")
    return len(notes.read_text()) if prompt.metadata["has_notes"] else 0.25
"""


@in_event_loop
async def test_a_verifier_sees_the_messages_and_the_directory(tmp_path: Path) -> None:
    file = tmp_path / "verifier.py"
    file.write_text(VERIFIER)
    write = "import pathlib; pathlib.Path('notes.txt').write_text('noted')"
    command = f'{sys.executable} {AGENT} call; {sys.executable} -c "{write}"'
    agent = AgentProgram(("sh", "-c", command), ENV)
    samples = await played(
        agent, request(has_notes=True), request(1, has_notes=False), verifier=f"{file}:score"
    )
    assert [sample.reward for sample in samples] == [5.0, 0.25]


@in_event_loop
async def test_an_agent_can_t_score_itself_where_a_verifier_does(tmp_path: Path) -> None:
    file = tmp_path / "verifier.py"
    file.write_text("def score(text, prompt):\n    return -1\n")
    [sample] = await played(program("call", "reward=1"), request(), verifier=f"{file}:score")
    assert sample.reward == -1.0


@in_event_loop
async def test_an_engine_that_fails_ends_all_runs() -> None:
    generator = ScriptedGenerator(TOKENIZER, reply)
    generator.failures = [EngineError("out of memory")]
    with pytest.raises(EngineError, match="out of memory"), single_error():
        await played(program("call"), request(0), request(1), generator=generator)
