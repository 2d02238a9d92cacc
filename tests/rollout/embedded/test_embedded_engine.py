import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt
from megatron_gspo.rollout.embedded.embedded_engine import EmbeddedEngine
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from tests.support.reference_models import (
    EOS,
    VOCABULARY,
    checkpoint,
    dense_config,
    loaded_engine,
    moe_config,
    next_config,
    part_config,
    prompts,
    reference_model,
    sink_config,
    teacher_forced,
    window_config,
)

CONFIGS = {
    "moe": moe_config,
    "dense": dense_config,
    "sinks": sink_config,
    "windows": window_config,
    "next": next_config,
    "part": part_config,
}
SEEDS = {"sinks": 2}  # one whose samples end early and late


def build(kind="moe", **settings):
    reference = reference_model(CONFIGS[kind](), seed=SEEDS.get(kind, 0))
    return reference, loaded_engine(CONFIGS[kind](), checkpoint(reference), **settings)


def key(samples):
    return {(s.prompt_index, s.sample_index): s.response_ids.tolist() for s in samples}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.7, 5)])
def test_log_probs_equal_a_teacher_forced_pass(kind, temperature, top_k):
    reference, engine = build(kind)
    sampling = SamplingParams(3, 20, temperature=temperature, top_k=top_k)
    samples = engine.generate(prompts(9), sampling, seed=1)
    lengths = [s.response_length for s in samples]
    # Rows left the batch on the way, and some stayed.
    assert min(lengths) < 10 and max(lengths) == 20
    for sample in samples:
        sample.check()
        np.testing.assert_allclose(
            sample.rollout_log_probs, teacher_forced(reference, sample, temperature), atol=1e-5
        )


def test_the_most_likely_ids_belong_to_their_tokens():
    reference, engine = build(top_log_probs=6)
    samples = engine.generate(prompts(5), SamplingParams(2, 8, temperature=0.7), seed=1)
    for sample in samples:
        sample.check()
        with torch.no_grad():
            logits = reference(torch.from_numpy(sample.tokens)[None]).logits[0]
        log_probs = (logits[sample.prompt_length - 1 : -1] / 0.7).log_softmax(-1)
        expected = log_probs.topk(6).values.numpy()
        np.testing.assert_allclose(sample.rollout_top_log_probs, expected, atol=1e-5)
        of_ids = log_probs.numpy()[
            np.arange(sample.response_length)[:, None], sample.rollout_top_ids
        ]
        np.testing.assert_allclose(sample.rollout_top_log_probs, of_ids, atol=1e-5)


def test_the_ids_that_could_be_drawn_belong_to_their_tokens():
    reference, engine = build()
    sampling = SamplingParams(3, 20, temperature=0.7, top_k=9, min_p=0.3, max_support=9)
    samples = engine.generate(prompts(9), sampling, seed=1)
    assert len({s.response_length for s in samples}) > 2
    for sample in samples:
        sample.check()
        with torch.no_grad():
            logits = reference(torch.from_numpy(sample.tokens)[None]).logits[0]
        probs = (logits[sample.prompt_length - 1 : -1] / 0.7).softmax(-1).numpy()
        supports = np.split(sample.support_ids, np.cumsum(sample.support_lengths)[:-1])
        for token, support in enumerate(supports):
            of_support = probs[token][support]
            assert len(support) <= 9 and of_support.argmax() == 0
            assert of_support.min() > 0.299 * probs[token].max()
            share = probs[token][sample.response_ids[token]] / of_support.sum()
            assert sample.rollout_log_probs[token] == pytest.approx(np.log(share), abs=1e-5)


def test_samples_are_prompt_major_and_end_where_they_should():
    _, engine = build()
    questions = prompts(6)
    samples = engine.generate(questions, SamplingParams(4, 12), seed=2)
    wanted = [(p.index, i) for p in questions for i in range(4)]
    assert [(s.prompt_index, s.sample_index) for s in samples] == wanted
    reasons = {s.finish_reason for s in samples}
    assert reasons == {"stop", "length"}
    for sample, prompt in zip(
        samples, np.repeat(np.array(questions, dtype=object), 4), strict=True
    ):
        np.testing.assert_array_equal(sample.tokens[: sample.prompt_length], prompt.token_ids)
        response = sample.response_ids.tolist()
        assert EOS not in response[:-1]
        assert (response[-1] == EOS) == (sample.finish_reason == "stop")
        assert len(response) == 12 or sample.finish_reason == "stop"
        assert sample.loss_mask.all() and np.isnan(sample.reward) and sample.weight_version == 0


def test_samples_do_not_depend_on_batches_order_or_split():
    _, engine = build()
    questions = prompts(13)
    sampling = SamplingParams(3, 16)
    whole = key(engine.generate(questions, sampling, seed=5))
    # Samples of a prompt differ from one another.
    assert len({tuple(r) for r in whole.values()}) > 30
    _, small = build(max_batch=4)
    assert key(small.generate(questions[::-1], sampling, seed=5)) == whole
    halves = key(engine.generate(questions[::2], sampling, seed=5))
    halves |= key(small.generate(questions[1::2], sampling, seed=5))
    assert halves == whole
    fewer = key(engine.generate(questions, SamplingParams(2, 16), seed=5))
    assert fewer == {k: v for k, v in whole.items() if k[1] < 2}
    shorter = key(engine.generate(questions, SamplingParams(3, 7), seed=5))
    assert shorter == {k: v[:7] for k, v in whole.items()}
    assert key(engine.generate(questions, sampling, seed=6)) != whole


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_equals_the_librarys_generate(kind):
    reference, engine = build(kind)
    questions = prompts(8)
    samples = engine.generate(questions, SamplingParams(1, 15, temperature=0.0), seed=0)
    config = GenerationConfig(max_new_tokens=15, do_sample=False, eos_token_id=EOS, pad_token_id=0)
    for prompt, sample in zip(questions, samples, strict=True):
        ids = torch.from_numpy(prompt.token_ids)[None]
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        np.testing.assert_array_equal(sample.tokens, out[0].numpy())
        np.testing.assert_allclose(
            sample.rollout_log_probs, teacher_forced(reference, sample), atol=1e-5
        )


def test_long_responses_outgrow_the_reserved_cache():
    reference = reference_model(moe_config(max_position_embeddings=400))
    engine = loaded_engine(
        moe_config(max_position_embeddings=400),
        checkpoint(reference),
        eos_token_ids=[VOCABULARY - 1],
    )
    samples = engine.generate(prompts(3), SamplingParams(2, 300, temperature=0.5), seed=4)
    assert max(s.response_length for s in samples) > 200
    for sample in samples:
        np.testing.assert_allclose(
            sample.rollout_log_probs, teacher_forced(reference, sample, 0.5), atol=3e-5
        )


def test_several_end_tokens_and_where_they_come_from(tmp_path):
    reference = reference_model(moe_config(eos_token_id=[1, 2]))
    reference.save_pretrained(tmp_path)
    engine = EmbeddedEngine(tmp_path)
    assert isinstance(engine, RolloutEngine)
    assert engine.eos_token_ids == (1, 2) and engine.weight_version == 0
    last = {s.response_ids[-1] for s in engine.generate(prompts(20), SamplingParams(4, 30), seed=0)}
    assert {1, 2} <= last
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')

    class Tokenizer:
        eos_token_id = 4

        def batch_decode(self, sequences, skip_special_tokens=False):
            return ["-".join(map(str, ids)) for ids in sequences]

    engine = EmbeddedEngine(tmp_path, tokenizer=Tokenizer())
    assert engine.eos_token_ids == (3, 4)
    sample = engine.generate(prompts(1), SamplingParams(1, 5), seed=0)[0]
    assert sample.text == "-".join(map(str, sample.response_ids))
    assert EmbeddedEngine(tmp_path, eos_token_ids=[7]).eos_token_ids == (7,)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_a_config_is_filled_by_the_first_update_alone(tmp_path, kind, dtype):
    """No random weights are drawn, and nothing but the weights differs from a model read from
    its folder.
    """
    reference_model(CONFIGS[kind]()).save_pretrained(tmp_path)
    from_folder = EmbeddedEngine(tmp_path, dtype=dtype)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    engine = EmbeddedEngine(CONFIGS[kind](), dtype=dtype)
    assert torch.equal(torch.get_rng_state(), before)
    engine.update_weights(checkpoint(from_folder.model).items(), version=0)
    tensors = [
        dict((*e.model.named_parameters(), *e.model.named_buffers())) for e in (from_folder, engine)
    ]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        assert tensor.dtype == tensors[1][name].dtype
        assert torch.equal(tensor, tensors[1][name]), name
    samples = [e.generate(prompts(5), SamplingParams(2, 10), seed=3) for e in (from_folder, engine)]
    assert key(samples[0]) == key(samples[1])
    for sample, other in zip(*samples, strict=True):
        # weights mapped from a file lie at other addresses, and products of unaligned rows round
        # differently
        np.testing.assert_allclose(
            sample.rollout_log_probs, other.rollout_log_probs, rtol=0, atol=2e-6
        )


def test_an_engine_without_weights_or_closed_or_paused_refuses():
    engine = EmbeddedEngine(moe_config())
    with pytest.raises(RuntimeError, match="update_weights before generate"):
        engine.generate(prompts(1), SamplingParams(1, 4), seed=0)
    engine.update_weights(checkpoint(reference_model(moe_config())).items(), version=3)
    engine.pause()
    with pytest.raises(RuntimeError, match="call resume first"):
        engine.generate(prompts(1), SamplingParams(1, 4), seed=0)
    engine.resume()
    assert engine.generate(prompts(1), SamplingParams(1, 4), seed=0)[0].weight_version == 3
    assert engine.generate([], SamplingParams(1, 4), seed=0) == []
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="after close"):
        engine.generate(prompts(1), SamplingParams(1, 4), seed=0)


def test_what_cannot_be_served_is_refused_in_one_line(tmp_path):
    _, engine = build()
    ok = np.array([3, 4], dtype=np.int64)
    cases = [
        (
            Prompt(7, np.array([3, VOCABULARY]), ""),
            4,
            "prompt 7: token id 40 is outside the vocabulary of 40",
        ),
        (
            Prompt(8, ok, ""),
            63,
            "prompt 8: 2 tokens + max_response_length=63 exceed max_position_embeddings=64",
        ),
        (Prompt(9, ok[:0], ""), 4, "prompt 9: token_ids is empty"),
    ]
    for prompt, length, message in cases:
        with pytest.raises(ValueError, match="^" + message.replace("+", r"\+")) as error:
            engine.generate([prompt], SamplingParams(1, length), seed=0)
        assert "\n" not in str(error.value)
    for source, settings, message in [
        (tmp_path / "none", {}, "no config.json"),
        (moe_config(), {"max_batch": 0}, "max_batch=0"),
        (moe_config(), {"eos_token_ids": [40]}, "eos_token_ids=.40."),
        (moe_config(eos_token_id=None), {}, "pass eos_token_ids"),
        (
            dense_config(layer_types=["full_attention", "chunked_attention"]),
            {},
            "full and sparse attention, windows, and linear attention beside them",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            EmbeddedEngine(source, **settings)


def test_broken_weights_are_named_not_sampled():
    reference, engine = build()
    tensors = checkpoint(reference)
    tensors["model.norm.weight"][:] = float("nan")
    engine.update_weights(tensors.items(), version=12)
    with pytest.raises(
        RuntimeError, match="prompt 10., weight version 12: the log-probs are not finite"
    ):
        engine.generate(prompts(2), SamplingParams(1, 4), seed=0)
