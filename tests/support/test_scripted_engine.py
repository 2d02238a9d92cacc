import numpy as np
import pytest
import torch

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.rollout.sft_engine import DemonstrationEngine
from tests.support.scripted_engine import ScriptedEngine, ScriptedResponse


def prompt(index, answer=None):
    return Prompt(index, np.array([5, 6, index], dtype=np.int64), text="q", answer=answer)


def test_scripted_responses_come_back_prompt_major():
    script = {
        3: [ScriptedResponse([9, 1], [-0.5, -0.25], text="a"), ScriptedResponse([8], finish_reason="length")],
        4: [ScriptedResponse([7, 7, 1]), ScriptedResponse([1])],
    }
    engine = ScriptedEngine(script)
    assert isinstance(engine, RolloutEngine)
    samples = engine.generate([prompt(4), prompt(3)], SamplingParams(2, 3), seed=0)
    assert [(s.prompt_index, s.sample_index) for s in samples] == [(4, 0), (4, 1), (3, 0), (3, 1)]
    assert samples[0].tokens.tolist() == [5, 6, 4, 7, 7, 1] and samples[0].prompt_length == 3
    assert samples[0].rollout_log_probs is None and samples[3].finish_reason == "length"
    assert samples[2].rollout_log_probs.tolist() == [-0.5, -0.25] and samples[2].text == "a"
    assert samples[2].loss_mask.tolist() == [True, True]


def test_a_function_may_be_the_script():
    engine = ScriptedEngine(lambda p, i, seed: ScriptedResponse([p.index + i, seed]))
    samples = engine.generate([prompt(3)], SamplingParams(2, 2), seed=17)
    assert [s.response_ids.tolist() for s in samples] == [[3, 17], [4, 17]]


def test_updates_and_calls_are_recorded():
    engine = ScriptedEngine({3: [ScriptedResponse([1])]})
    weight = torch.ones(2)
    engine.update_weights(iter([("a", weight)]), version=6)
    weight.zero_()
    engine.pause()
    engine.resume()
    engine.close()
    (version, tensors), *rest = engine.updates
    assert version == 6 and not rest and tensors["a"].tolist() == [1, 1]
    assert engine.calls == ["pause", "resume", "close"]
    assert engine.generate([prompt(3)], SamplingParams(1, 1), seed=0)[0].weight_version == 6


@pytest.mark.parametrize(
    "index, n, response, message",
    [
        (3, 2, ScriptedResponse([1]), "prompt 3 has 1 scripted responses: add sample 1"),
        (4, 1, ScriptedResponse([1]), "prompt 4 has 0 scripted responses: add sample 0"),
        (3, 1, ScriptedResponse([7, 7, 1]), "prompt 3, sample 0: 3 scripted tokens"),
        (3, 1, ScriptedResponse([]), "prompt 3, sample 0: 0 scripted tokens"),
        (3, 1, ScriptedResponse([7, 1], [-1.0]), "rollout_log_probs has shape"),
    ],
)
def test_a_script_that_cannot_be_played_is_refused(index, n, response, message):
    with pytest.raises(ValueError, match=message):
        ScriptedEngine({3: [response]}).generate([prompt(index)], SamplingParams(n, 2), seed=0)


def encode(text):
    return [ord(c) for c in text]


def test_demonstrations_are_the_answer_and_the_end_token():
    engine = DemonstrationEngine(encode, eos_token_id=1)
    assert isinstance(engine, RolloutEngine)
    read = iter([("a", torch.ones(1)), ("b", torch.ones(1))])
    engine.update_weights(read, version=4)
    assert next(read, None) is None
    fits, cut = engine.generate([prompt(2, "ab"), prompt(3, "abc")], SamplingParams(1, 3), seed=0)
    fits.check()
    cut.check()
    assert fits.tokens.tolist() == [5, 6, 2, 97, 98, 1] and fits.finish_reason == "stop"
    assert cut.response_ids.tolist() == [97, 98, 99] and cut.finish_reason == "length"
    assert fits.rollout_log_probs is None and fits.reward == 1.0 and fits.text == "ab"
    assert fits.loss_mask.tolist() == [True] * 3 and fits.weight_version == 4


def test_demonstrations_need_one_answer():
    engine = DemonstrationEngine(encode, eos_token_id=1)
    with pytest.raises(ValueError, match="prompt 2 has no reference answer"):
        engine.generate([prompt(2)], SamplingParams(1, 3), seed=0)
    with pytest.raises(ValueError, match="n_samples_per_prompt=2: "):
        engine.generate([prompt(2, "a")], SamplingParams(2, 3), seed=0)
