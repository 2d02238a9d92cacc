"""The picture of the curves: what is drawn, and that the picture is one."""

import json
from pathlib import Path

import pytest

from megatron_gspo.tracking.plots import PANELS, _has_data, draw_run

pytest.importorskip("matplotlib")


def write(folder: Path, records: list[dict]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


RL = [
    {"step": 0, "eval/accuracy": 0.2},
    {"step": 1, "reward/mean": 0.3, "loss": 1.0},
    {"step": 2, "reward/mean": None},
]


def test_panels_of_a_run() -> None:
    assert [p.title for p in PANELS if _has_data(p, RL)] == [
        "Training reward (mean)",
        "Held-out accuracy, %",
    ]
    assert [p.title for p in PANELS if _has_data(p, [{"step": 1, "loss": 2.0}])] == [
        "Training loss"
    ]


def colours(file: Path) -> set[tuple[int, int, int]]:
    from matplotlib.image import imread

    pixels = (imread(file)[..., :3] * 255).round().astype(int)
    return {tuple(pixel) for pixel in pixels.reshape(-1, 3).tolist()}


BLUE = (0x25, 0x63, 0xEB)
ORANGE = (0xD9, 0x77, 0x06)


def test_one_run_is_drawn(tmp_path: Path) -> None:
    records = [{"step": i, "reward/mean": i / 60, "entropy": 1 - i / 60} for i in range(60)]
    file = draw_run(write(tmp_path / "run", records))
    assert file == tmp_path / "run" / "curves.png"
    assert file.read_bytes().startswith(b"\x89PNG")
    drawn = colours(file)
    assert BLUE in drawn and ORANGE not in drawn
