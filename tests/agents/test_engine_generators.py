"""Runs on the embedded engine, against a pass of the same model over their rows, and calls on
servers."""

import asyncio
from contextlib import ExitStack

import aiohttp
import numpy as np
import pytest
import torch

from megatron_gspo.agents.agent_host import AgentHost
from megatron_gspo.agents.agent_run import RunLimits
from megatron_gspo.agents.agent_source import AgentEngine
from megatron_gspo.agents.endpoint import AgentEndpoint
from megatron_gspo.agents.engine_generators import EngineGenerator, ServerGenerator
from megatron_gspo.agents.generation import CallLimits, Generation, cut_at_stop
from megatron_gspo.agents.players import ProgramPlayer
from megatron_gspo.agents.rendering import TemplateRendering
from megatron_gspo.agents.session_tree import Row
from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt
from megatron_gspo.errors import EngineError
from megatron_gspo.routing_replay.perturbation import Perturbation, RouterTerms
from tests.agents.test_agent_host import program
from tests.support.agent_endpoint import Serving, in_event_loop
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.reference_models import checkpoint, loaded_engine, moe_config, reference_model
from tests.support.sglang_generator import Generator as ScriptedServer
from tests.support.sglang_generator import Setup
from tests.support.waiting import wait_for

TOKENIZER = chat_tokenizer()
QUESTION = {"role": "user", "content": "list"}
CONFIG = moe_config(
    vocab_size=len(TOKENIZER), max_position_embeddings=1024, eos_token_id=TOKENIZER.eos_token_id
)


def reference():
    return reference_model(CONFIG, scale=4.0)


async def played(model, *, max_batch: int) -> Serving:
    """A run with a line of three calls, one asked twice, and two threads at the same time."""
    engine = loaded_engine(CONFIG, checkpoint(model), return_routed_experts=True)
    generator = EngineGenerator(engine, SamplingParams(), seed=0, max_batch=max_batch)
    rendering = TemplateRendering(TOKENIZER, [TOKENIZER.eos_token_id])
    endpoint = AgentEndpoint(rendering)
    await endpoint.start()
    try:
        async with aiohttp.ClientSession() as session:
            limits = RunLimits(max_call_length=12)
            run = endpoint.open_run(generator, limits, seed=5)
            served = Serving(endpoint, generator, limits, session, run, [])
            messages = [QUESTION]
            for _ in range(3):
                messages += [await served.message(messages), {"role": "user", "content": "on"}]
            await served.message(messages[:3])
            names = ("one", "two")
            threads = [[{"role": "user", "content": name}] for name in names]
            await asyncio.gather(*map(served.message, threads))
        return served
    finally:
        await endpoint.close()
        generator.close()


def scored(model, row: Row) -> np.ndarray:
    """[R] log-probs of a row's response tokens from one pass over it."""
    logits = model(torch.from_numpy(row.tokens)[None]).logits[0].double()
    log_probs = logits.log_softmax(-1)[
        torch.arange(len(row.tokens) - 1), torch.from_numpy(row.tokens[1:])
    ]
    return log_probs[row.prompt_length - 1 :].numpy()


@in_event_loop
async def test_engine_and_a_pass_over_the_rows_agree_on_every_trained_token() -> None:
    model = reference()
    served = await played(model, max_batch=16)
    rows = served.rows
    assert [len(row.turns) for row in rows] == [3, 1, 1, 1]
    for row in rows:
        assert row.log_probs is not None and row.routes is not None
        trained = row.loss_mask
        np.testing.assert_allclose(row.log_probs[trained], scored(model, row)[trained], atol=2e-5)
        layers = CONFIG.num_hidden_layers
        assert row.routes.shape == (len(row.tokens) - 1, layers, CONFIG.num_experts_per_tok)


@in_event_loop
async def test_the_draws_are_the_same_in_every_batch() -> None:
    model = reference()
    first = (await played(model, max_batch=1)).rows
    second = (await played(model, max_batch=16)).rows
    assert sorted(row.tokens.tolist() for row in first) == sorted(
        row.tokens.tolist() for row in second
    )


def test_routers_are_perturbed_with_the_seed_of_the_step() -> None:
    seeds = set()

    def record(terms: RouterTerms) -> torch.Tensor:
        seeds.add(terms.seed)
        return terms.logits

    engine = loaded_engine(CONFIG, checkpoint(reference()))
    engine.perturb_routers(Perturbation(record))
    rendering = TemplateRendering(TOKENIZER, [TOKENIZER.eos_token_id])
    player = ProgramPlayer(program("call", "reward=1"))
    host = AgentHost(AgentEndpoint(rendering), player, RunLimits(), concurrent_runs=1)
    agents = AgentEngine(engine, host, max_batch=1)
    try:
        for seed in (5, 6):
            agents.generate([Prompt(0, np.array([1]), "list")], SamplingParams(1, 4), seed=seed)
    finally:
        agents.close()
    assert seeds == {5, 6}


@in_event_loop
async def test_a_failure_of_the_engine_reaches_every_call_of_its_batch() -> None:
    class Failing:
        def generate(self, prompts, sampling, *, seed):
            raise EngineError("out of memory")

    generator = EngineGenerator(Failing(), SamplingParams(), seed=0)
    prompt = np.array([1], np.int64)
    calls = [
        generator.generate(prompt, CallLimits(4), seed=seed, routes_start=0) for seed in range(3)
    ]
    failures = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(failure) for failure in failures] == ["out of memory"] * 3
    generator.close()


def test_calls_on_servers() -> None:
    """The seed is the call's, and an update in the middle splits the versions."""
    prompt = np.arange(2, 7)
    limits = CallLimits(4)
    with ScriptedServer() as server, Setup(server.url) as setup:
        generator = ServerGenerator(setup.client, SamplingParams())

        def generate(seed: int):
            return generator.generate(prompt, limits, seed=seed, routes_start=0)

        reply = setup.loop.run(generate(1))
        assert reply.tokens.tolist() == [15, 16, 17, 18]
        assert reply.log_probs is not None
        assert reply.log_probs.tolist() == [-15 / 8, -16 / 8, -17 / 8, -18 / 8]
        assert reply.versions.tolist() == [3] * 4
        assert (reply.finish_reason, reply.routes) == ("length", None)

        server.gate = False
        waiting = setup.loop.spawn(generate(2))
        wait_for(lambda: len(server.bodies) == 2)
        setup.client.interrupt()
        server.gate = True
        server.version = "00c0ffee:4"
        setup.serve(server.version)
        reply = waiting.result(timeout=60)
        assert reply.tokens.tolist() == [15, 16, 17, 18]
        assert reply.versions.tolist() == [3, 4, 4, 4]
        seeds = [body["sampling_params"]["sampling_seed"] for body in server.bodies]
        assert len(set(seeds)) == 3


def test_server_killed_in_a_reply() -> None:
    """The call is repeated at the other server, and the agent gets its reply."""
    with ExitStack() as stack:
        servers = [ScriptedServer(), ScriptedServer()]
        for server in servers:
            server.__enter__()
            server.gate = False
        setup = stack.enter_context(Setup(*(server.url for server in servers)))
        generator = ServerGenerator(setup.client, SamplingParams())
        rendering = TemplateRendering(TOKENIZER, [TOKENIZER.eos_token_id])
        endpoint = AgentEndpoint(rendering)

        async def agent() -> tuple[dict, list[Row]]:
            await endpoint.start()
            async with aiohttp.ClientSession() as session:
                limits = RunLimits(max_call_length=4)
                run = endpoint.open_run(generator, limits, seed=5)
                served = Serving(endpoint, generator, limits, session, run, [])
                choice = await served.chat([QUESTION])
                await endpoint.close()
                return choice, served.rows

        playing = setup.loop.spawn(agent())
        wait_for(lambda: any(server.bodies for server in servers))
        servers.sort(key=lambda server: not server.bodies)
        killed, other = servers
        killed.__exit__()
        stack.callback(other.__exit__)
        other.gate = True
        choice, (row,) = playing.result(timeout=60)
        assert choice["finish_reason"] == "length"
        tokens = row.tokens[row.prompt_length :].tolist()
        assert tokens == [10 + (row.prompt_length + j) % 50 for j in range(4)]
        assert row.loss_mask.all()
        assert len(other.bodies) == 1


@pytest.mark.parametrize(
    "stop, length, finish_reason",
    [
        ((), 6, "length"),
        (("x",), 6, "length"),
        (("d",), 4, "stop"),
        (("bc", "f"), 3, "stop"),
        (("a",), 1, "stop"),
    ],
)
def test_replies_end_with_the_first_token_that_completes_a_stop_string(
    stop: tuple[str, ...], length: int, finish_reason: str
) -> None:
    generation = Generation(
        np.arange(6),
        np.arange(6, dtype=np.float32),
        np.arange(6, dtype=np.int32),
        "length",
        np.arange(8)[:, None, None],
    )
    cut = cut_at_stop(generation, stop, lambda tokens: "abcdef"[: len(tokens)])
    assert cut.tokens.tolist() == list(range(length))
    assert cut.finish_reason == finish_reason
    assert len(cut.log_probs) == len(cut.versions) == length
    assert cut.routes[:, 0, 0].tolist() == list(range(2 + length))
