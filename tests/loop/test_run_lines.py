"""The lines at the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gspo.config import load_config
from megatron_gspo.loop.checkpoints import LoopState
from megatron_gspo.loop.run_lines import end_lines

_CONFIG = Path(__file__).parents[2] / "examples/qwen3_moe/tiny_gspo.yaml"


@pytest.mark.parametrize(
    "before, after, expected",
    [
        (0.347, 0.846, "held-out accuracy 34.7 % before, 84.6 % after"),
        (None, 1.0, "held-out accuracy 100.0 % after"),
        # Logits of a reward model, of which one alone could be a share of right responses.
        (-2.477, 0.295, "held-out reward -2.477 before, 0.295 after"),
    ],
)
def test_held_out_rewards_beyond_0_to_1_are_no_accuracy(
    before: float | None, after: float, expected: str, tmp_path: Path
) -> None:
    state = LoopState(step=2, wall_seconds=65.0, accuracy_before=before, accuracy_after=after)
    config = load_config(_CONFIG, [f"run_dir={tmp_path}"])
    [line, *_] = end_lines(config, state, held_out=4)
    assert line == f"trained 2 steps in 1:05; {expected}"
