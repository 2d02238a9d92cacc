"""The command of one rank."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_gspo.tools.rehearse.one_rank import parser, shortened_model

KINDS = ["sliding_attention", "full_attention"] * 3
TEXT = {"num_hidden_layers": 6, "layer_types": KINDS}


@pytest.mark.parametrize(
    ("given", "shortened"),
    [
        (
            {"num_hidden_layers": 48, "max_window_layers": 48, "hidden_size": 8},
            {"num_hidden_layers": 4, "max_window_layers": 4, "hidden_size": 8},
        ),
        (TEXT, {"num_hidden_layers": 4, "layer_types": KINDS[:4]}),
        (
            {"vision_config": {"depth": 6, "sizes": [6] * 6}, "text_config": TEXT},
            {
                "vision_config": {"depth": 6, "sizes": [6] * 6},
                "text_config": {"num_hidden_layers": 4, "layer_types": KINDS[:4]},
            },
        ),
    ],
    ids=["numbers", "a list with an entry for each layer", "a model with images"],
)
def test_a_model_is_shortened_in_its_config(given: Any, shortened: Any, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (tmp_path / "config.json").write_text(json.dumps(given))
    assert shortened_model(str(tmp_path), 4, made) == made
    assert json.loads((made / "config.json").read_text()) == shortened
    assert json.loads((tmp_path / "config.json").read_text()) == given


def test_overrides_follow_the_config() -> None:
    args = parser().parse_args(
        ["a.yaml", "x.y=1", "--world", "4", "--rank", "3", "--output", "o.json"]
    )
    assert (args.config, args.overrides, args.rank, args.layers, args.imbalance) == (
        "a.yaml",
        ["x.y=1"],
        3,
        None,
        1.0,
    )
