"""The rollout log (``rollouts.jsonl``): which samples a step trained on, and the weight
versions that sampled them.
"""

from __future__ import annotations

import numpy as np

from megatron_gspo.loop.generation import DataCursor


def rollout_record(table: np.ndarray, cursor: DataCursor) -> dict[str, object]:
    """A step's record: [prompt, sample, oldest version, newest version] of each sample, and the
    cursor after it.
    """
    columns = ("prompt_index", "sample_index", "oldest_version", "newest_version")
    columns_of_samples = (table[name].tolist() for name in columns)
    samples = [list(sample) for sample in zip(*columns_of_samples, strict=True)]
    return {"samples": samples, "cursor": cursor.drawn, "pending": list(cursor.pending)}
