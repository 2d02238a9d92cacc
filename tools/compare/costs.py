"""The cost of each part of a step and of storing routes: measured, and estimated for large models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_gspo.models import ModelError, family_of, read_config
from megatron_gspo.models.model_shape import experts_of
from megatron_gspo.routing_replay.routes import expert_id_dtype
from megatron_gspo.tools.compare.run_records import Run, mean_of
from megatron_gspo.tools.compare.statistics import Interval, interval

# (metric, words) in the order of a step. `train` is the remainder if its parts were timed.
PHASES = (
    ("time/generate", "generation"),
    ("time/verify", "rewards"),
    ("time/log_probs", "old log-probs"),
    ("time/forward", "forward"),
    ("time/backward", "backward"),
    ("time/optimizer", "optimizer"),
    ("time/train", "rest of training"),
    ("time/routing", "routes: replay, metrics"),
    ("time/weight_sync", "weight sync"),
    ("other", "everything else"),
)
INSIDE_TRAIN = ("time/forward", "time/backward", "time/optimizer")
_AFTER_WARM_UP = 2  # the first step includes one-time costs
_FULL_BATCH = (512, 16_384)  # responses and their tokens, for the table of storage


@dataclass(frozen=True)
class Cost:
    """Mean seconds per step of each phase over a variant's runs (means of means), without evaluations and saves."""

    variant: str
    seconds: dict[str, float]
    step: Interval
    memory_gib: float | None
    replay_bytes: float | None
    replay_bytes_per_token: float | None
    bytes_moved: float | None


@dataclass(frozen=True)
class PublishedModel:
    """The sizes of a model that determine its routes. layers: MoE layers."""

    name: str
    layers: int
    experts: int
    experts_per_token: int

    @property
    def bytes_per_expert_id(self) -> int:
        """1 up to 256 experts, else 2."""
        return expert_id_dtype(self.experts).itemsize

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.experts_per_token * self.bytes_per_expert_id


@dataclass(frozen=True)
class StorageRow:
    """A model's routes for a rollout batch: bytes per token and of the batch, and bytes of its old log-probs."""

    model: PublishedModel
    bytes_per_token: int
    tokens: int
    batch_bytes: int
    log_prob_bytes: int


PUBLISHED = (PublishedModel("Qwen3-30B-A3B", 48, 128, 8), PublishedModel("Qwen3-235B-A22B", 94, 128, 8))


def cost_of(variant: str, runs: Sequence[Run]) -> Cost | None:
    """The cost of a variant; None if no run has a time."""
    parts = [found for run in runs if (found := _seconds(run))]
    if not parts:
        return None
    seconds = {name: sum(part.get(name, 0.0) for part in parts) / len(parts) for name, _ in PHASES}
    return Cost(
        variant,
        {name: value for name, value in seconds.items() if value > 0},
        interval([sum(part.values()) for part in parts]),
        _mean(runs, "perf/peak_memory_gib", largest=True),
        _mean(runs, "routing/replay_bytes"),
        _per_token(runs),
        _mean(runs, "routing/bytes_moved"),
    )


def estimated_storage(models: Sequence[PublishedModel], batch: tuple[int, int] = _FULL_BATCH) -> list[StorageRow]:
    """Routes of `batch` = (responses, tokens each); prompts are within the tokens."""
    tokens = batch[0] * batch[1]
    return [
        StorageRow(model, model.bytes_per_token, tokens, model.bytes_per_token * tokens, 4 * tokens) for model in models
    ]


def model_of(config: Mapping[str, Any], name: str = "this model") -> PublishedModel | None:
    """The compared model, from the config.json of its directory; None where that isn't there or has no experts."""
    try:
        found = read_config(str(config.get("model", {}).get("path", "")))
        if not experts_of(found):
            return None
        _, shape = family_of(found)
    except ModelError:
        return None
    return PublishedModel(name, sum(shape.moe_layers), shape.num_experts, shape.experts_per_token)


def _seconds(run: Run) -> dict[str, float]:
    step = mean_of(run, "time/step", first=_AFTER_WARM_UP)
    if step is None:
        return {}
    found = {name: mean_of(run, name, first=_AFTER_WARM_UP) or 0.0 for name, _ in PHASES if name != "other"}
    train = found["time/train"]
    found["time/train"] = max(0.0, train - sum(found[name] for name in INSIDE_TRAIN))
    kept_out = sum(_spent(run, name) for name in ("time/evaluate", "time/checkpoint"))
    outside = sum(found[name] for name, _ in PHASES if name != "other")
    return found | {"other": max(0.0, step - kept_out - outside)}


def _spent(run: Run, name: str) -> float:
    """Seconds a step of a phase that few steps have."""
    chosen = [record for record in run.records if record["step"] >= _AFTER_WARM_UP]
    return sum(record.get(name) or 0.0 for record in chosen) / len(chosen)


def _mean(runs: Sequence[Run], metric: str, *, largest: bool = False) -> float | None:
    if largest:
        values = [max(found) for run in runs if (found := [r[metric] for r in run.records if r.get(metric)])]
    else:
        values = [value for run in runs if (value := mean_of(run, metric)) is not None]
    return sum(values) / len(values) if values else None


def _per_token(runs: Sequence[Run]) -> float | None:
    """Stored bytes over the tokens of the rollout batch."""
    stored = tokens = 0.0
    for run in runs:
        for record in run.records:
            if record.get("routing/replay_bytes") and record.get("perf/tokens"):
                stored += record["routing/replay_bytes"]
                tokens += record["perf/tokens"]
    return stored / tokens if tokens else None
