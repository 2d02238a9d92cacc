"""Published config.json files and indexes of every model of the README: taken, and read as
Transformers does.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from benchmarks.family_pages.facts import read_facts
from megatron_gspo.models import check_names, family_of, read_config
from megatron_gspo.models.checkpoint_checks import check_quantization
from megatron_gspo.models.hf_checkpoint import INDEX, CheckpointReader
from tests.models.published_models import CONFIGS, NAMES, NOT_HERE, expanded


def model_directory(folder: Path, model: str) -> Path:
    """Config and index; the files of the index are not there."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[model]))
    names = (name for pattern in NAMES[model] for name in expanded(pattern))
    weight_map = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_every_model_has_both() -> None:
    assert CONFIGS.keys() == NAMES.keys()
    assert list(expanded("a.{0..1}.{x,y}")) == ["a.0.x", "a.0.y", "a.1.x", "a.1.y"]


def test_every_model_of_the_docs_is_here() -> None:
    """Of the sizes of dense Qwen3 two are."""
    names = {
        name
        for facts in read_facts()
        for variant in facts.variants
        for name in (variant.name, *variant.like, *variant.others)
    }
    assert names - CONFIGS.keys() - {"Qwen3-0.6B to 32B"} == NOT_HERE


@pytest.mark.parametrize("model", CONFIGS)
def test_the_names_of_a_published_index_are_those_of_its_config(model: str, tmp_path: Path) -> None:
    folder = model_directory(tmp_path, model)
    config = read_config(folder)
    family, shape = family_of(config)
    with CheckpointReader(folder) as reader:
        check_quantization(config, reader.stored_names)
        check_names(reader.names, family, shape)


@pytest.mark.parametrize("model", [model for model in CONFIGS if model != "Kimi-K2-Instruct"])
def test_a_published_config_is_read_as_transformers_reads_it(model: str) -> None:
    config = CONFIGS[model]
    read = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config)).to_dict()
    ours = family_of(copy.deepcopy(config))[1]
    theirs = family_of(read)[1]
    assert ours == theirs


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("MiniMax-M2", dict(max_position_embeddings=204800)),  # M2.1 to M2.7
        (
            "Qwen3-4B",
            dict(
                rope_scaling={
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                }
            ),
        ),
    ],
)
def test_variants_of_published_configs_are_taken(model: str, changes: dict[str, object]) -> None:
    config = copy.deepcopy(CONFIGS[model]) | changes
    assert family_of(config)[1].num_layers == config["num_hidden_layers"]
