"""Responses of the embedded engine in chunks, and of servers that hold the weights."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_gspo.config import Config, SamplingParams
from megatron_gspo.data.sample import Prompt
from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.embedded.embedded_engine import EmbeddedEngine
from megatron_gspo.tools.evaluate.response_engines import EmbeddedResponses, open_engine
from megatron_gspo.tools.make_tiny_model import character_tokenizer
from tests.support.sglang_generator import Generator, expected
from tests.support.tiny_models import save_tiny_model

SAMPLING = SamplingParams(n_samples_per_prompt=2, max_response_length=4)


def prompts(count):
    rng = np.random.default_rng(0)
    return [Prompt(i, rng.integers(5, 90, 3 + i % 4), "") for i in range(count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "dense", num_hidden_layers=1, vocab_size=104)
    character_tokenizer().save_pretrained(folder)
    return str(folder)


def config(model, engine="sglang", **sections):
    plain = {
        "run_dir": "unused",
        "model": {"path": model, "dtype": "float32"},
        "data": {"prompts": "unused"},
        "rollout": {"engine": engine, "rollout_batch_size": 1, "max_batch_size": 6},
        "training": {"steps": 1, "global_batch_size": 1},
    }
    return Config.from_dict(plain | sections)


def texts(groups):
    return {
        sample.prompt_index * 10 + sample.sample_index: sample.response_ids.tolist()
        for each in groups
        for group in each
        for sample in group
    }


def test_chunks_give_what_one_call_gives(model):
    engine = EmbeddedEngine(model, tokenizer=character_tokenizer(), max_batch=6)
    asked = prompts(7)
    whole = {
        s.prompt_index * 10 + s.sample_index: s.response_ids.tolist()
        for s in engine.generate(asked, SAMPLING, seed=5)
    }
    chunks = list(
        EmbeddedResponses(engine, engine.max_batch).groups(asked, set(), SAMPLING, seed=5)
    )
    assert [len(chunk) for chunk in chunks] == [3, 3, 1] and texts(chunks) == whole
    # what is done is not returned, and decides nothing: the others are decoded in the same chunks
    batches = []
    generate = engine.generate
    engine.generate = lambda chunk, *a, **k: (
        batches.append([p.index for p in chunk]) or generate(chunk, *a, **k)
    )
    first = [group[0].prompt_index for group in chunks[0]]
    rest = list(
        EmbeddedResponses(engine, engine.max_batch).groups(
            asked, {*first, chunks[1][0][0].prompt_index}, SAMPLING, seed=5
        )
    )
    assert texts(rest) == {
        key: ids
        for key, ids in whole.items()
        if key // 10 not in {*first, chunks[1][0][0].prompt_index}
    }
    assert [sorted(batch) for batch in batches] == [
        sorted(g[0].prompt_index for g in chunk) for chunk in chunks[1:]
    ]


def test_servers_answer_with_their_own_weights(model):
    """No weights are sent, and every response comes from the version that the servers report."""
    with Generator() as first, Generator() as second:
        first.version = second.version = "default"
        urls = (first.url, second.url)
        settings = config(model, sglang={"urls": list(urls), "health_interval": 0.1})
        asked = prompts(5)
        with open_engine(settings, character_tokenizer(), urls) as engine:
            responses = [g for each in engine.groups(asked, {3}, SAMPLING, seed=0) for g in each]
        assert sorted(group[0].prompt_index for group in responses) == [0, 1, 2, 4]
        for group in responses:
            assert [sample.response_ids.tolist() for sample in group] == [
                expected(asked[group[0].prompt_index])
            ] * 2
        assert first.updates == second.updates == 0 and first.bodies and second.bodies
        assert {body["sampling_params"]["temperature"] for body in first.bodies} == {1.0}


def test_servers_of_different_weights_are_refused(model):
    with Generator() as first, Generator() as second:
        first.version = "default"
        second.version = "step-9"
        urls = (first.url, second.url)
        with pytest.raises(EngineError, match="do not report one version of the weights"):
            with open_engine(
                config(model, sglang={"urls": list(urls)}), character_tokenizer(), urls
            ):
                pass


def test_a_server_that_is_not_there(model):
    urls = ("http://127.0.0.1:9",)
    with pytest.raises(EngineError, match="http://127.0.0.1:9 gives no version .*; check the URL"):
        with open_engine(config(model, sglang={"urls": list(urls)}), character_tokenizer(), urls):
            pass
