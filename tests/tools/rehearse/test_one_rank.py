"""The command of one rank."""

import json
from pathlib import Path

from megatron_gspo.tools.rehearse.one_rank import parser, shortened_model


def test_a_model_is_shortened_in_its_config_alone(tmp_path: Path) -> None:
    given = tmp_path / "given"
    made = tmp_path / "made"
    given.mkdir(), made.mkdir()
    config = {"num_hidden_layers": 48, "max_window_layers": 48, "hidden_size": 8}
    (given / "config.json").write_text(json.dumps(config))
    assert shortened_model(str(given), 4, made) == made
    assert json.loads((made / "config.json").read_text()) == {
        **config,
        "num_hidden_layers": 4,
        "max_window_layers": 4,
    }


def test_a_list_with_an_entry_for_each_layer_is_cut(tmp_path):
    kinds = ["sliding_attention", "full_attention"] * 3
    config = {"architectures": ["GptOssForCausalLM"], "num_hidden_layers": 6, "layer_types": kinds}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "made").mkdir()
    made = json.loads(
        (shortened_model(str(tmp_path), 4, tmp_path / "made") / "config.json").read_text()
    )
    assert made == {**config, "num_hidden_layers": 4, "layer_types": kinds[:4]}


def test_of_a_model_with_images_the_language_model_is_shortened(tmp_path):
    kinds = ["linear_attention", "full_attention"] * 3
    text = {"num_hidden_layers": 6, "layer_types": kinds}
    config = {"vision_config": {"depth": 6, "sizes": [6] * 6}, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "made").mkdir()
    made = json.loads(
        (shortened_model(str(tmp_path), 2, tmp_path / "made") / "config.json").read_text()
    )
    assert made == {**config, "text_config": {"num_hidden_layers": 2, "layer_types": kinds[:2]}}


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
