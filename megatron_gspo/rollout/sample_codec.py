"""Samples as bytes: a table of numbers, then the concatenated tokens, masks and per-token
numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from megatron_gspo.data.sample import FINISH_REASONS, Sample
from megatron_gspo.rollout.top_codec import packed_top, unpacked_top

_PER_TOKEN = ("rollout_log_probs", "advantages", "old_log_probs", "ref_log_probs")
_COLUMNS = (
    "position",
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
    "rows",
    "top_ids",
    "has_support",
    "support_ids",
)
# At the start of the bytes; another version's are refused.
_FORMAT = int.from_bytes(b"samples7", "little")
_COLUMN = {name: i for i, name in enumerate(_COLUMNS)}


def encode_samples(samples: Sequence[Sample], positions: Sequence[int]) -> bytes:
    """Samples and their positions in a batch as bytes, a multiple of 8.

    The number of numpy concatenations does not depend on the number of samples.
    """
    table = np.zeros((len(samples), len(_COLUMNS)), dtype=np.int64)
    texts = [sample.text.encode() for sample in samples]
    for row, sample, position, text in zip(table, samples, positions, texts, strict=True):
        row[:] = _numbers(sample, position, len(text))
    metadata = b""
    if any(sample.metadata for sample in samples):
        metadata = json.dumps([sample.metadata for sample in samples]).encode()
    floats = []
    for sample in samples:
        arrays = [getattr(sample, name) for name in _PER_TOKEN]
        floats += [array for array in arrays if array is not None]
    routes = [
        np.ascontiguousarray(sample.routed_experts)
        for sample in samples
        if sample.routed_experts is not None
    ]
    missing_routes = [s.missing_routes for s in samples if s.missing_routes is not None]
    top_ids = [s.rollout_top_ids.ravel() for s in samples if s.rollout_top_ids is not None]
    top_log_probs = [
        s.rollout_top_log_probs.ravel() for s in samples if s.rollout_top_log_probs is not None
    ]
    first_of_top, second_of_top = packed_top(
        _joined(top_ids, np.int32), _joined(top_log_probs, np.float32)
    )
    sections = [
        np.array([_FORMAT, len(samples), len(metadata), second_of_top.itemsize], dtype=np.int64),
        table,
        np.array([sample.reward for sample in samples], dtype=np.float64),
        _joined([s.tokens for s in samples if s.has_tokens], np.int64),
        _joined([s.row_lengths for s in samples if s.row_lengths is not None], np.int64),
        _joined(floats, np.float32),
        _joined([s.token_versions for s in samples if s.token_versions is not None], np.int32),
        first_of_top,
        _joined([s.support_lengths for s in samples if s.support_lengths is not None], np.int32),
        _joined([s.support_ids for s in samples if s.support_ids is not None], np.int32),
        second_of_top,  # after what is aligned to 4 bytes
        *routes,
        _joined(missing_routes, np.uint8),
        _joined([s.loss_mask for s in samples], np.uint8),
    ]
    size = sum(section.nbytes for section in sections) + sum(map(len, texts)) + len(metadata)
    padding = bytes(-size % 8)
    return b"".join([*(section.data for section in sections), *texts, metadata, padding])


def _numbers(sample: Sample, position: int, text_bytes: int) -> tuple[int, ...]:
    """A sample's row of the table, in the order of `_COLUMNS`."""
    routes = sample.routed_experts
    route_layers, route_k = (0, 0) if routes is None else routes.shape[1:]
    return (
        position,
        sample.prompt_index,
        sample.sample_index,
        sample.length,
        sample.prompt_length,
        FINISH_REASONS.index(sample.finish_reason),
        sample.weight_version,
        text_bytes,
        *(getattr(sample, name) is not None for name in _PER_TOKEN),
        route_layers,
        route_k,
        0 if routes is None else routes.dtype.itemsize,
        sample.missing_routes is not None,
        sample.token_versions is not None,
        sample.has_tokens,
        0 if sample.row_lengths is None else len(sample.row_lengths),
        0 if sample.rollout_top_ids is None else sample.rollout_top_ids.shape[1],
        sample.support_ids is not None,
        0 if sample.support_ids is None else len(sample.support_ids),
    )


def decode_samples(buffer: np.ndarray) -> list[tuple[int, Sample]]:
    """The inverse of `encode_samples` over a writable uint8 array: (position, sample).

    The samples' arrays are views into it. Raises ValueError for bytes of another version.
    """
    reader = _Reader(buffer)
    version, count, metadata_bytes, top_itemsize = reader.read(np.int64, 4).tolist()
    if version != _FORMAT:
        raise ValueError("samples were encoded by another version")
    table = reader.read(np.int64, count * len(_COLUMNS)).reshape(count, len(_COLUMNS))
    rewards = reader.read(np.float64, count).tolist()
    lengths = table[:, _COLUMN["length"]]
    prompt_lengths = table[:, _COLUMN["prompt_length"]]
    responses = lengths - prompt_lengths
    stored = np.where(table[:, _COLUMN["tokens"]], lengths, 0)
    tokens = np.split(reader.read(np.int64, int(stored.sum())), np.cumsum(stored)[:-1])
    rows = _Reader(reader.read(np.uint8, 8 * int(table[:, _COLUMN["rows"]].sum())))
    present = table[:, _COLUMN[_PER_TOKEN[0]] : _COLUMN[_PER_TOKEN[-1]] + 1]
    floats = _Reader(reader.read(np.uint8, 4 * int((present.sum(1) * responses).sum())))
    known = table[:, _COLUMN["token_versions"]] != 0
    versions = _Reader(reader.read(np.uint8, 4 * int(responses[known].sum())))
    top_counts = table[:, _COLUMN["top_ids"]]
    top_size = int((top_counts * responses).sum())
    first_of_top = reader.read(np.uint32, top_size)
    has_support = table[:, _COLUMN["has_support"]] != 0
    support_lengths = _Reader(reader.read(np.uint8, 4 * int(responses[has_support].sum())))
    support_ids = _Reader(reader.read(np.uint8, 4 * int(table[:, _COLUMN["support_ids"]].sum())))
    second_of_top = reader.read(np.dtype(f"u{top_itemsize}"), top_size)
    top_ids, top_log_probs = (
        _Reader(values.view(np.uint8)) for values in unpacked_top(first_of_top, second_of_top)
    )
    routes = _read_routes(reader, table)
    masks = np.split(
        reader.read(np.uint8, int(responses.sum())).view(bool), np.cumsum(responses)[:-1]
    )
    samples = []
    for i, row in enumerate(table.tolist()):
        record = dict(zip(_COLUMNS, row, strict=True))
        response = record["length"] - record["prompt_length"]
        arrays = {
            name: floats.read(np.float32, response) if record[name] else None for name in _PER_TOKEN
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
            token_versions=versions.read(np.int32, response) if record["token_versions"] else None,
            row_lengths=rows.read(np.int64, record["rows"]) if record["rows"] else None,
            rollout_log_probs=arrays["rollout_log_probs"],
            rollout_top_ids=top_ids.read_rows(np.int32, response, record["top_ids"]),
            support_lengths=(
                support_lengths.read(np.int32, response) if record["has_support"] else None
            ),
            support_ids=(
                support_ids.read(np.int32, record["support_ids"]) if record["has_support"] else None
            ),
            rollout_top_log_probs=top_log_probs.read_rows(np.float32, response, record["top_ids"]),
            advantages=arrays["advantages"],
            old_log_probs=arrays["old_log_probs"],
            ref_log_probs=arrays["ref_log_probs"],
        )
        samples.append((record["position"], sample))
    for (_, sample), size in zip(samples, table[:, _COLUMN["text_bytes"]].tolist(), strict=True):
        sample.text = reader.read(np.uint8, size).tobytes().decode()
    if metadata_bytes:
        for (_, sample), metadata in zip(
            samples, json.loads(reader.read(np.uint8, metadata_bytes).tobytes()), strict=True
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
        if not itemsize:
            routes.append(None)
            continue
        ids = reader.read(np.dtype(f"u{itemsize}"), (length - 1) * layers * k)
        routes.append(np.require(ids.reshape(length - 1, layers, k), requirements="A"))
    missing: list[np.ndarray | None] = []
    for length, _, _, _, has_missing in sizes:
        missing.append(reader.read(np.bool_, length - 1) if has_missing else None)
    return list(zip(routes, missing, strict=True))


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype=dtype)


class _Reader:
    """Consecutive typed views into a uint8 array."""

    def __init__(self, buffer: np.ndarray) -> None:
        self.buffer = buffer
        self.offset = 0

    def read(self, dtype: type | np.dtype, count: int) -> np.ndarray:
        size = count * np.dtype(dtype).itemsize
        data = self.buffer[self.offset : self.offset + size]
        self.offset += size
        return data.view(dtype)

    def read_rows(self, dtype: type, rows: int, width: int) -> np.ndarray | None:
        """[rows, width]; None for a width of 0."""
        return self.read(dtype, rows * width).reshape(rows, width) if width else None
