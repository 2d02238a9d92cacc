"""Layouts that a model and a number of GPUs allow, by the checks of the config
(``config/parallel_checks.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

from megatron_gspo.config import ParallelConfig
from megatron_gspo.config.config_error import ConfigError
from megatron_gspo.config.parallel_checks import check_divisibility, check_layout
from megatron_gspo.errors import InputError
from megatron_gspo.models.model_shape import experts_of, layers_of

MOST_VIRTUAL = 4  # chunks of a stage that are tried
MOST_CONTEXT = 16


def divisors(number: int, most: int) -> list[int]:
    """Divisors of ``number`` up to ``most``."""
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]


def candidates(hf: dict[str, Any], gpus: int, node: int) -> Iterator[dict[str, Any]]:
    """Sizes to try: TP within a node, EP over powers of two, as keys of the ``parallel``
    section.
    """
    experts = experts_of(hf) or 0
    powers = [2**i for i in range(13) if 2**i <= gpus]
    tensors = [d for d in powers if d <= node]
    contexts = [d for d in powers if d <= MOST_CONTEXT]
    count = layers_of(hf) or 1
    # stages that do not divide the layers may divide them with embedding and loss counted
    pipelines = [(size, 0) for size in divisors(count, gpus)]
    pipelines += [(size, 2) for size in divisors(count + 2, gpus) if count % size]
    experts_over = [d for d in powers if experts and experts % d == 0] or [1]
    for tensor, (pipeline, extra), context, expert in product(
        tensors, pipelines, contexts, experts_over
    ):
        if gpus % (tensor * pipeline * context):
            continue
        layers = (count + extra) // pipeline
        virtual = (
            [None, *(d for d in divisors(layers, MOST_VIRTUAL) if d > 1)]
            if pipeline > 1
            else [None]
        )
        for chunks, expert_tensor in product(virtual, {1, tensor} if experts else {1}):
            yield dict(
                tensor_model_parallel_size=tensor,
                pipeline_model_parallel_size=pipeline,
                virtual_pipeline_model_parallel_size=chunks,
                account_for_embedding_in_pipeline_split=bool(extra),
                account_for_loss_in_pipeline_split=bool(extra),
                context_parallel_size=context,
                expert_model_parallel_size=expert,
                expert_tensor_parallel_size=expert_tensor,
            )


def feasible(
    hf: dict[str, Any], gpus: int, node: int, global_batch_size: int
) -> list[ParallelConfig]:
    """The valid layouts with at least one sequence of a mini-batch for each data-parallel rank."""
    layouts = []
    for sizes in candidates(hf, gpus, node):
        parallel = ParallelConfig(**sizes)
        try:
            check_layout(parallel, gpus)
            check_divisibility(parallel, hf)
        except ConfigError:
            continue
        if parallel.data_parallel_size(gpus) <= global_batch_size:
            layouts.append(parallel)
    return layouts


_KEYS = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "VP": "virtual_pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
}


def parse_layout(text: str, hf: dict[str, Any], gpus: int) -> ParallelConfig:
    """The layout of a name such as ``TP4 EP8``; ``InputError`` if it is invalid or does not fit the
    model and the GPUs.

    ``PP8+2``: embedding and loss count as layers.
    """
    sizes: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        match = re.fullmatch(r"(TP|PP|VP|CP|EP|ETP)(\d+)(\+2)?", word.upper())
        if match is None or int(match[2]) < 1 or (match[3] and match[1] != "PP"):
            known = ", ".join(f"{key}2" for key in _KEYS)
            raise InputError(f"--layout {text}: {word} is not a size; write some of {known}")
        sizes[_KEYS[match[1]]] = int(match[2])
        if match[3]:
            sizes |= dict(
                account_for_embedding_in_pipeline_split=True,
                account_for_loss_in_pipeline_split=True,
            )
    if sizes.get(_KEYS["VP"]) == 1:
        del sizes[_KEYS["VP"]]
    parallel = ParallelConfig(**sizes)
    try:
        check_layout(parallel, gpus)
        check_divisibility(parallel, hf)
    except ConfigError as error:
        raise InputError(f"--layout {text}: {error}") from None
    return parallel


def name_of(parallel: ParallelConfig) -> str:
    """A name such as ``TP2 PP4 EP8``: sizes above 1, or ``DP only``; ``PP8+2`` if embedding and
    loss count as layers."""
    sizes = {name: getattr(parallel, key) or 1 for name, key in _KEYS.items()}
    extra = f"+{parallel.extra_pipeline_layers}" if parallel.extra_pipeline_layers else ""
    words = [
        f"{name}{size}{extra if name == 'PP' else ''}" for name, size in sizes.items() if size > 1
    ]
    return " ".join(words) or "DP only"
