"""Generation over ranks: each rank generates a part of the prompts, or one rank all; every rank gets all samples.

The samples of a rank are sent as one byte buffer: a table of numbers, then the concatenated tokens, masks and
per-token numbers. There are two collectives: sizes and bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import FINISH_REASONS, Prompt, Sample
from megatron_gspo.errors import EngineError, UserError, first_line
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.rollout.sample_checks import check_samples

_PER_TOKEN = ("rollout_log_probs", "advantages", "old_log_probs", "ref_log_probs")
_COLUMNS = ("place", "prompt_index", "sample_index", "length", "prompt_length", "finish", "weight_version",
            "text_bytes", *_PER_TOKEN, "route_layers", "route_k", "route_bytes", "missing_routes",
            "token_versions")  # fmt: skip
_FORMAT = int.from_bytes(b"samples3", "little")  # at the start of the bytes; another version's are refused
_COLUMN = {name: i for i, name in enumerate(_COLUMNS)}


def split_prompts(prompts: Sequence[Prompt], num_ranks: int) -> list[list[int]]:
    """[rank] -> positions in `prompts`, ascending. Each position occurs once; counts differ by at most 1.

    Prompts are assigned in order of length, alternating the direction over the ranks, which balances the lengths.
    Deterministic.
    """
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i].token_ids), i))
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for turn in range(0, len(order), num_ranks):
        dealt = order[turn : turn + num_ranks]
        ranks = range(num_ranks) if (turn // num_ranks) % 2 == 0 else range(num_ranks - 1, -1, -1)
        for position, rank in zip(dealt, ranks, strict=False):
            shares[rank].append(position)
    return [sorted(share) for share in shares]


def generate_on_ranks(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    seed: int,
    group: dist.ProcessGroup | None = None,
    device: str | torch.device = "cpu",
    vocab_size: int | None = None,
) -> list[Sample]:
    """`engine.generate` with the prompts distributed over `group`: the same samples on every rank, prompt-major.

    Every rank passes the same prompts. group None: this process alone. device: where the group's backend
    communicates ("cuda" for NCCL). vocab_size: bound of the token ids. The samples are checked (`check_samples`). An
    exception of one rank is raised on all; on the others it is an EngineError with the rank. So no rank waits for one
    that failed.
    """
    if group is None or dist.get_world_size(group) == 1:
        return _generate(engine, prompts, sampling, seed, vocab_size)
    share = split_prompts(prompts, dist.get_world_size(group))[dist.get_rank(group)]
    failure: Exception | None = None
    samples: list[Sample] = []
    try:
        samples = _generate(engine, [prompts[i] for i in share], sampling, seed, vocab_size)
    except Exception as error:
        failure = error
    places = [i * sampling.n_samples_per_prompt + j for i in share for j in range(sampling.n_samples_per_prompt)]
    return _gather(samples, places, group, torch.device(device), failure)


def _generate(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    seed: int,
    vocab_size: int | None,
) -> list[Sample]:
    """This process's part, checked. ValueError and OSError of the engine become EngineError."""
    try:
        samples = engine.generate(prompts, sampling, seed=seed)
    except UserError:
        raise
    except (ValueError, OSError) as error:
        name = type(engine).__name__
        raise EngineError(f"the engine {name} failed: {type(error).__name__}: {first_line(error)}") from error
    check_samples(samples, prompts, sampling, vocab_size=vocab_size)
    return samples


def gather_samples(
    samples: Sequence[Sample], places: Sequence[int], group: dist.ProcessGroup | None, device: str = "cpu"
) -> list[Sample]:
    """All ranks' samples on every rank, in ascending order of `places` (one int per sample, distinct over
    ranks)."""
    if group is None or dist.get_world_size(group) == 1:
        return [samples[i] for i in np.argsort(np.asarray(places, dtype=np.int64), kind="stable")]
    return _gather(samples, places, group, torch.device(device), None)


def broadcast_samples(
    samples: Sequence[Sample] | None, group: dist.ProcessGroup | None, device: str | torch.device = "cpu"
) -> list[Sample]:
    """The first rank's samples on every rank, in their order. The others pass None."""
    if group is None or dist.get_world_size(group) == 1:
        return list(samples or ())
    payload = bytearray(encode_samples(samples, range(len(samples)))) if samples is not None else bytearray()
    source = dist.get_global_rank(group, 0)
    size = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=source, group=group)
    buffer = torch.frombuffer(payload, dtype=torch.uint8) if payload else torch.empty(int(size), dtype=torch.uint8)
    buffer = buffer.to(device)
    dist.broadcast(buffer, src=source, group=group)
    return [sample for _, sample in decode_samples(buffer.cpu().numpy())]


def _gather(
    samples: Sequence[Sample],
    places: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
    failure: Exception | None,
) -> list[Sample]:
    payload = encode_samples(samples, places) if failure is None else first_line(failure).encode()
    buffers, failed = _all_gather_bytes(payload, failure is not None, group, device)
    if failure is not None:
        raise failure
    for rank, buffer in enumerate(buffers):
        if failed[rank]:
            raise EngineError(f"generation failed on rank {rank} of the group: {buffer.tobytes().decode()}")
    found = [pair for buffer in buffers for pair in decode_samples(buffer)]
    found.sort(key=lambda pair: pair[0])
    return [sample for _, sample in found]


def _all_gather_bytes(
    payload: bytes | bytearray, failed: bool, group: dist.ProcessGroup, device: torch.device
) -> tuple[list[np.ndarray], list[bool]]:
    """Every rank's payload as a uint8 array, and its flag."""
    head = torch.tensor([len(payload), int(failed)], dtype=torch.int64, device=device)
    heads = [torch.empty_like(head) for _ in range(dist.get_world_size(group))]
    dist.all_gather(heads, head, group=group)
    sizes, flags = zip(*(h.tolist() for h in heads), strict=True)
    width = max(*sizes, 1)
    mine = torch.zeros(width, dtype=torch.uint8)
    if payload:
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    mine = mine.to(device)
    everyone = [torch.empty_like(mine) for _ in heads]
    dist.all_gather(everyone, mine, group=group)
    arrays = [buffer.cpu().numpy()[:size] for buffer, size in zip(everyone, sizes, strict=True)]
    return arrays, [bool(flag) for flag in flags]


def encode_samples(samples: Sequence[Sample], places: Sequence[int]) -> bytes:
    """Samples and their places as bytes, by a constant number of numpy concatenations."""
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
        row[:] = (*ids, *sizes, finish, sample.weight_version, len(text), *present, *shape, missing, versions)
    metadata = (
        b"" if not any(s.metadata for s in samples) else json.dumps([s.metadata for s in samples]).encode()
    )
    floats = [getattr(s, name) for s in samples for name in _PER_TOKEN if getattr(s, name) is not None]
    all_routes = [np.ascontiguousarray(s.routed_experts) for s in samples if s.routed_experts is not None]
    all_missing = [s.missing_routes for s in samples if s.missing_routes is not None]
    parts = [
        np.array([_FORMAT, len(samples), len(metadata)], dtype=np.int64),
        table,
        np.array([sample.reward for sample in samples], dtype=np.float64),
        _joined([s.tokens for s in samples], np.int64),
        _joined(floats, np.float32),
        _joined([s.token_versions for s in samples if s.token_versions is not None], np.int32),
        *all_routes,
        _joined(all_missing, np.uint8),
        _joined([s.loss_mask for s in samples], np.uint8),
    ]
    return b"".join([*(part.data for part in parts), *texts, metadata])


def decode_samples(buffer: np.ndarray) -> list[tuple[int, Sample]]:
    """The inverse of `encode_samples` over a writable uint8 array: (place, sample), arrays being views into
    it. Raises ValueError for bytes of another version."""
    reader = _Reader(buffer)
    version, count, metadata_bytes = reader.take(np.int64, 3).tolist()
    if version != _FORMAT:
        raise ValueError("samples were encoded by another version")
    table = reader.take(np.int64, count * len(_COLUMNS)).reshape(count, len(_COLUMNS))
    rewards = reader.take(np.float64, count).tolist()
    lengths, prompt_lengths = table[:, _COLUMN["length"]], table[:, _COLUMN["prompt_length"]]
    responses = lengths - prompt_lengths
    tokens = np.split(reader.take(np.int64, int(lengths.sum())), np.cumsum(lengths)[:-1])
    present = table[:, _COLUMN[_PER_TOKEN[0]] : _COLUMN[_PER_TOKEN[-1]] + 1]
    floats = _Reader(reader.take(np.uint8, 4 * int((present.sum(1) * responses).sum())))
    known = table[:, _COLUMN["token_versions"]] != 0
    versions = _Reader(reader.take(np.uint8, 4 * int(responses[known].sum())))
    routes = _read_routes(reader, table)
    masks = np.split(reader.take(np.uint8, int(responses.sum())).view(bool), np.cumsum(responses)[:-1])
    samples = []
    for i, row in enumerate(table.tolist()):
        record = dict(zip(_COLUMNS, row, strict=True))
        response = record["length"] - record["prompt_length"]
        arrays: dict[str, Any] = {n: floats.take(np.float32, response) if record[n] else None for n in _PER_TOKEN}
        sample = Sample(
            prompt_index=record["prompt_index"],
            sample_index=record["sample_index"],
            tokens=tokens[i],
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


def _read_routes(reader: _Reader, table: np.ndarray) -> list[tuple[np.ndarray | None, np.ndarray | None]]:
    """(routed_experts, missing_routes) of every sample."""
    columns = [_COLUMN[name] for name in ("length", "route_layers", "route_k", "route_bytes", "missing_routes")]
    sizes = table[:, columns].tolist()
    routes: list[np.ndarray | None] = []
    for length, layers, k, itemsize, _ in sizes:
        ids = None
        if itemsize:
            ids = reader.take(np.dtype(f"u{itemsize}"), (length - 1) * layers * k).reshape(length - 1, layers, k)
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
