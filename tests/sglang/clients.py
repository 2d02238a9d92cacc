"""Engines on real servers, as the loop builds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor
from transformers import AutoTokenizer

from megatron_gspo.data.sample import Prompt
from megatron_gspo.loop.engines import stop_ids
from megatron_gspo.models import family_of, read_config
from megatron_gspo.rollout.sglang.client import ModelFacts, RequestLimits
from megatron_gspo.rollout.sglang.server_pool import FleetSettings
from megatron_gspo.rollout.sglang.sglang_engine import EngineSettings, SGLangEngine
from megatron_gspo.routing_replay.routes import RouteShape
from megatron_gspo.weight_transport.weight_update import make_route
from tests.support.reference_models import checkpoint
from tests.support.transformers_reference import load_reference


def engine_on(urls: Sequence[str], model: str, *, routes: bool = True, weight_route: str = "tensor",
              folder: Path | None = None, **settings: object) -> SGLangEngine:
    """An engine of servers that serve `model`. Close it."""
    shape = family_of(read_config(model))[1]
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    facts = ModelFacts(shape.vocab_size, stop_ids(model, tokenizer, shape.vocab_size), shape.max_position_embeddings,
                       RouteShape.of_model(shape) if routes else None)
    given = dict(fleet=FleetSettings(health_interval=0.5), limits=RequestLimits(timeout=60.0, retries=4), recovery=30.0,
                 update_timeout=60.0, bucket_bytes=1 << 20)
    return SGLangEngine(EngineSettings(tuple(urls), **{**given, **settings}), facts,
                        make_route(weight_route, directory=folder, source=model), tokenizer.decode)


def checkpoint_stream(model: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model's checkpoint under their names, as a trainer streams them."""
    reference = load_reference(model).float()
    yield from checkpoint(reference).items()


def prompts_of(lengths: Sequence[int], vocabulary: int, seed: int = 0, shared: int = 0) -> list[Prompt]:
    """Random prompts of these lengths whose first `shared` tokens are the same."""
    rng = np.random.default_rng(seed)
    start = rng.integers(3, vocabulary, shared)
    rest = [rng.integers(3, vocabulary, length - shared) for length in lengths]
    return [Prompt(i, np.concatenate([start, tail]), text="") for i, tail in enumerate(rest)]
