"""Samples as bytes: a table of numbers, then the concatenated tokens, masks and per-token
numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_gspo.data.sample import FINISH_REASONS, Sample

_PER_TOKEN = ("rollout_log_probs", "advantages", "old_log_probs", "ref_log_probs")
_COLUMNS = (
    "place",
    "prompt_index",
    "sample_index",
    "length",
    "prompt_length",
    "finish",
    "weight_version",
    "text_bytes",
    *_PER_TOKEN,
    "route_layers",
    "route_k",
    "route_bytes",
    "missing_routes",
    "token_versions",
    "tokens",
)
# At the start of the bytes; another version's are refused.
_FORMAT = int.from_bytes(b"samples4", "little")
_COLUMN = {name: i for i, name in enumerate(_COLUMNS)}


def encode_samples(samples: Sequence[Sample], places: Sequence[int]) -> bytes:
    """Samples and their places as bytes, a multiple of 8, by a constant number of numpy
    concatenations.
    """
    table = np.zeros((len(samples), len(_COLUMNS)), dtype=np.int64)
    texts = [sample.text.encode() for sample in samples]
    for row, sample, place, text in zip(table, samples, places, texts, strict=True):
        routes = sample.routed_experts
        present = [getattr(sample, name) is not None for name in _PER_TOKEN]
        shape = (0, 0, 0) if routes is None else (*routes.shape[1:], routes.dtype.itemsize)
        missing = sample.missing_routes is not None
        versions = sample.token_versions is not None
        finish = FINISH_REASONS.index(sample.finish_reason)
        ids = (place, sample.prompt_index, sample.sample_index)
        sizes = (sample.length, sample.prompt_length)
        given = missing, versions, sample.has_tokens
        row[:] = (*ids, *sizes, finish, sample.weight_version, len(text), *present, *shape, *given)
    metadata = (
        b""
        if not any(s.metadata for s in samples)
        else json.dumps([s.metadata for s in samples]).encode()
    )
    floats = [
        getattr(s, name) for s in samples for name in _PER_TOKEN if getattr(s, name) is not None
    ]
    all_routes = [
        np.ascontiguousarray(s.routed_experts) for s in samples if s.routed_experts is not None
    ]
    all_missing = [s.missing_routes for s in samples if s.missing_routes is not None]
    parts = [
        np.array([_FORMAT, len(samples), len(metadata)], dtype=np.int64),
        table,
        np.array([sample.reward for sample in samples], dtype=np.float64),
        _joined([s.tokens for s in samples if s.has_tokens], np.int64),
        _joined(floats, np.float32),
        _joined([s.token_versions for s in samples if s.token_versions is not None], np.int32),
        *all_routes,
        _joined(all_missing, np.uint8),
        _joined([s.loss_mask for s in samples], np.uint8),
    ]
    size = sum(part.nbytes for part in parts) + sum(map(len, texts)) + len(metadata)
    return b"".join([*(part.data for part in parts), *texts, metadata, bytes(-size % 8)])


def decode_samples(buffer: np.ndarray) -> list[tuple[int, Sample]]:
    """The inverse of `encode_samples` over a writable uint8 array: (place, sample), arrays being
    views into it. Raises ValueError for bytes of another version."""
    reader = _Reader(buffer)
    version, count, metadata_bytes = reader.take(np.int64, 3).tolist()
    if version != _FORMAT:
        raise ValueError("samples were encoded by another version")
    table = reader.take(np.int64, count * len(_COLUMNS)).reshape(count, len(_COLUMNS))
    rewards = reader.take(np.float64, count).tolist()
    lengths = table[:, _COLUMN["length"]]
    prompt_lengths = table[:, _COLUMN["prompt_length"]]
    responses = lengths - prompt_lengths
    stored = np.where(table[:, _COLUMN["tokens"]], lengths, 0)
    tokens = np.split(reader.take(np.int64, int(stored.sum())), np.cumsum(stored)[:-1])
    present = table[:, _COLUMN[_PER_TOKEN[0]] : _COLUMN[_PER_TOKEN[-1]] + 1]
    floats = _Reader(reader.take(np.uint8, 4 * int((present.sum(1) * responses).sum())))
    known = table[:, _COLUMN["token_versions"]] != 0
    versions = _Reader(reader.take(np.uint8, 4 * int(responses[known].sum())))
    routes = _read_routes(reader, table)
    masks = np.split(
        reader.take(np.uint8, int(responses.sum())).view(bool), np.cumsum(responses)[:-1]
    )
    samples = []
    for i, row in enumerate(table.tolist()):
        record = dict(zip(_COLUMNS, row, strict=True))
        response = record["length"] - record["prompt_length"]
        arrays: dict[str, Any] = {
            n: floats.take(np.float32, response) if record[n] else None for n in _PER_TOKEN
        }
        sample = Sample(
            prompt_index=record["prompt_index"],
            sample_index=record["sample_index"],
            tokens=(
                tokens[i] if record["tokens"] else np.broadcast_to(np.int64(0), (record["length"],))
            ),
            prompt_length=record["prompt_length"],
            loss_mask=masks[i],
            finish_reason=FINISH_REASONS[record["finish"]],
            weight_version=record["weight_version"],
            reward=rewards[i],
            routed_experts=routes[i][0],
            missing_routes=routes[i][1],
            token_versions=versions.take(np.int32, response) if record["token_versions"] else None,
            **arrays,
        )
        samples.append((record["place"], sample))
    for (_, sample), size in zip(samples, table[:, _COLUMN["text_bytes"]].tolist(), strict=True):
        sample.text = reader.take(np.uint8, size).tobytes().decode()
    if metadata_bytes:
        for (_, sample), metadata in zip(
            samples, json.loads(reader.take(np.uint8, metadata_bytes).tobytes()), strict=True
        ):
            sample.metadata = metadata
    return samples


def _read_routes(
    reader: _Reader, table: np.ndarray
) -> list[tuple[np.ndarray | None, np.ndarray | None]]:
    """(routed_experts, missing_routes) of every sample."""
    columns = [
        _COLUMN[name]
        for name in ("length", "route_layers", "route_k", "route_bytes", "missing_routes")
    ]
    sizes = table[:, columns].tolist()
    routes: list[np.ndarray | None] = []
    for length, layers, k, itemsize, _ in sizes:
        ids = None
        if itemsize:
            ids = reader.take(np.dtype(f"u{itemsize}"), (length - 1) * layers * k).reshape(
                length - 1, layers, k
            )
            ids = np.require(ids, requirements="A")
        routes.append(ids)
    missing = [reader.take(np.bool_, length - 1) if known else None for length, *_, known in sizes]
    return list(zip(routes, missing, strict=True))


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype=dtype)


class _Reader:
    """Consecutive typed views into a uint8 array."""

    def __init__(self, buffer: np.ndarray) -> None:
        self.buffer = buffer
        self.offset = 0

    def take(self, dtype: type | np.dtype, count: int) -> np.ndarray:
        size = count * np.dtype(dtype).itemsize
        part = self.buffer[self.offset : self.offset + size]
        self.offset += size
        return part.view(dtype)
