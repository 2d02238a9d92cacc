"""The rollout log (``rollouts.jsonl``): which samples a step trained on, and the weight versions that sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_gspo.data.sample import Sample
from megatron_gspo.loop.generation import DataCursor


def rollout_record(samples: Sequence[Sample], cursor: DataCursor) -> dict[str, Any]:
    """A step's record: [prompt, sample, oldest version, newest version] of each sample, and the cursor after it."""
    rows = []
    for sample in samples:
        versions = [sample.weight_version] if sample.token_versions is None else sample.token_versions
        rows.append([sample.prompt_index, sample.sample_index, int(min(versions)), int(max(versions))])
    return {"samples": rows, "cursor": cursor.drawn, "pending": list(cursor.pending)}
