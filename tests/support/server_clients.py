"""Engines on real servers, as the loop builds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor
from transformers import AutoTokenizer

from megatron_gspo.config import SamplingParams, SGLangConfig, VLLMConfig
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.loop.engines import stop_ids
from megatron_gspo.models import family_of, read_config
from megatron_gspo.rollout.sample_checks import check_samples
from megatron_gspo.rollout.server_engine.request_stream import RequestStream, WeightsNeeded
from megatron_gspo.rollout.server_engine.rollout_client import RolloutClient, server_metrics
from megatron_gspo.rollout.server_engine.server_api import ServedModel
from megatron_gspo.rollout.server_kinds import SERVER_KINDS
from megatron_gspo.weight_transport.weight_update import make_transport
from tests.support.reference_models import checkpoint
from tests.support.server_engine import ServerEngine
from tests.support.transformers_reference import load_reference

CONFIGS = {"sglang": SGLangConfig, "vllm": VLLMConfig}
VOCABULARY = 96  # of the character tokenizer's ids, all below the model's vocabulary
SHORT = SamplingParams(n_samples_per_prompt=2, max_response_length=8)


def engine_on(
    urls: Sequence[str],
    model: str,
    *,
    kind: str = "sglang",
    routes: bool = True,
    top_log_probs: int = 0,
    weight_transport: str = "tensor",
    folder: Path | None = None,
    **settings: object,
) -> ServerEngine:
    """An engine of servers that serve `model`.

    kind: "sglang" or "vllm". settings: of the config. Close it.
    """
    shape = family_of(read_config(model))[1]
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    served = ServedModel(
        shape,
        stop_ids(model, tokenizer, shape.vocab_size),
        return_routes=routes,
        top_log_probs=top_log_probs,
    )
    given = dict(
        request_timeout=60.0,
        response_timeout=1800.0,
        retries=4,
        recovery_timeout=30.0,
        update_timeout=60.0,
        health_interval=0.5,
        weight_bucket_mb=1.0,
    )
    config = CONFIGS[kind](
        urls=tuple(urls), weight_transport=weight_transport, **{**given, **settings}
    )
    transport = make_transport(config, SERVER_KINDS[kind].api, run_dir=folder, source=model)
    client = RolloutClient(
        config.urls, config, served, tokenizer.decode, api=SERVER_KINDS[kind].api
    )
    return ServerEngine(config, client, transport)


def set_update_timeout(
    engine: ServerEngine, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the engine's next updates."""
    config = replace(engine.sync._config, update_timeout=seconds)
    monkeypatch.setattr(engine.sync, "_config", config)


def counts_of(engine: ServerEngine) -> dict[str, float]:
    """Its `rollout/*` metrics since the last call."""
    counts = engine.client.take_counts()
    return server_metrics(counts, engine.client.take_busy_seconds(), engine.num_serving)


def checkpoint_stream(model: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model's checkpoint under their names, as a trainer streams them."""
    reference = load_reference(model).float()
    yield from checkpoint(reference).items()


def prompts_of(
    lengths: Sequence[int], vocabulary: int, seed: int = 0, shared: int = 0
) -> list[Prompt]:
    """Random prompts of these lengths whose first `shared` tokens are the same."""
    rng = np.random.default_rng(seed)
    start = rng.integers(3, vocabulary, shared)
    rest = [rng.integers(3, vocabulary, length - shared) for length in lengths]
    return [Prompt(i, np.concatenate([start, tail]), text="") for i, tail in enumerate(rest)]


def everything(stream: RequestStream, count: int, update: Callable[[], None]) -> list[Sample]:
    """`count` groups, with an update whenever one is due, as in the loop."""
    while True:
        try:
            return [sample for group in stream.take(count) for sample in group]
        except WeightsNeeded:
            update()


def draw(
    engine: ServerEngine, model: str, prompts: Sequence[Prompt], sampling: SamplingParams = SHORT
) -> list[Sample]:
    """All samples of the prompts, checked; each is returned once."""
    stream = engine.client.stream()
    stream.start(prompts, sampling, seed=3)
    samples = everything(
        stream,
        len(prompts),
        lambda: engine.update_weights(checkpoint_stream(model), version=engine.weight_version),
    )
    check_samples(samples, prompts, sampling, vocab_size=engine.client.model.vocab_size)
    with pytest.raises(ValueError, match="only 0 groups"):
        stream.take(1)
    return samples
