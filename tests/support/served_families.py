"""What a real server of a family must give: Transformers' log-probs and routes, also of weights
that it is sent.
"""

from __future__ import annotations

from pathlib import Path

from megatron_gspo.config import SamplingParams
from megatron_gspo.rollout.sample_checks import check_samples
from tests.support.real_servers import save_character_model
from tests.support.server_agreement import assert_agrees
from tests.support.server_clients import checkpoint_stream, prompts_of
from tests.support.server_engine import ServerEngine
from tests.support.ties import without_ties
from tests.support.transformers_reference import load_reference

SAMPLING = SamplingParams(n_samples_per_prompt=2, max_response_length=12, temperature=0.8)


def two_models(folder: Path, kind: str, **sizes: int) -> tuple[str, str]:
    """The model that a server loads and one of other weights, which it is sent."""
    return (
        save_character_model(folder / "served", kind=kind, **sizes),
        save_character_model(folder / "sent", kind=kind, seed=1, **sizes),
    )


def assert_served(engine: ServerEngine, model: str, sent: str) -> None:
    """The server scores as Transformers does and takes the same routes, with its own weights
    and with others.
    """
    for version, weights in enumerate((model, sent)):
        engine.update_weights(checkpoint_stream(weights), version=version)
        _assert_agrees(engine, weights)


def _assert_agrees(engine: ServerEngine, model: str) -> None:
    prompts = prompts_of([3, 7, 40, 80], 96)
    responses = engine.generate(prompts, SAMPLING, seed=5)
    check_samples(responses, prompts, SAMPLING, vocab_size=engine.client.model.vocab_size)
    reference = load_reference(model)
    samples = (
        responses if responses[0].routed_experts is None else without_ties(reference, responses)
    )
    assert len(samples) >= len(responses) // 2
    assert_agrees(samples, reference, temperature=SAMPLING.temperature)
