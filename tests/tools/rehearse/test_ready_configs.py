"""Every config of a published model can be rehearsed: with the fewest layers that its pipeline
allows, and in full.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_gspo.config import load_config
from megatron_gspo.models import family_of, read_config
from megatron_gspo.tools.rehearse.__main__ import main
from tests.launch.test_configs import CONFIGS, EXAMPLES, processes

# Minutes: .ci/run has one config of each structure with the fewest layers, its workflow all.
pytestmark = pytest.mark.slow

# Configurations of published models.
SHIPPED = {folder.name: folder for folder in EXAMPLES.glob("*/models/*")}
READY = [file for file in CONFIGS if Path(load_config(file).model.path or "").name in SHIPPED]
# Others have no stages, and two layers of all kinds.
FEWEST = {
    "235b": 14,
    "480b": 14,
    "qwen3_next": 8,
    "qwen35_35b": 4,
    "qwen35_122b": 8,
    "qwen35_397b": 10,
    "minimax_m2": 14,
    "glm45": 10,
    "glm47_355b": 16,
    "gpt_oss_120b": 8,
    "deepseek_v3": 43,
    "glm5_744b": 24,
    "kimi_k25": 25,
    "nemotron3_nano": 6,
}
# Together more than sparse attention selects.
LENGTHS = {"data.max_prompt_length": 512, "rollout.max_response_length": 1600}


def fewest_layers(file: Path) -> int:
    """Two layers a stage, of which embedding and loss may each count as one; more where those
    beside the embedding are dense, so that the first stage has experts too. Without stages two, or
    as many as have all kinds of layers."""
    config = load_config(file)
    parallel = config.parallel
    dense = read_config(SHIPPED[Path(config.model.path).name]).get("first_k_dense_replace", 0)
    first_stage = parallel.account_for_embedding_in_pipeline_split + dense + 1
    layers = max(2, first_stage) * parallel.pipeline_model_parallel_size
    kinds = family_of(read_config(SHIPPED[Path(config.model.path).name]))[1].mixers
    return max(layers - parallel.extra_pipeline_layers, 1 + max(map(kinds.index, set(kinds))))


def structure(file: Path) -> tuple[object, ...]:
    """What decides which code of the model a rehearsal runs: the kinds of its layers, and whether
    adapters are trained.
    """
    config = load_config(file)
    family, shape = family_of(read_config(SHIPPED[Path(config.model.path).name]))
    experts = (shape.is_moe, shape.router.score, bool(shape.shared_expert_size))
    return frozenset(shape.mixers), *experts, family.stacks_experts, bool(config.lora.rank)


def shortest_of_each_structure() -> list[Path]:
    """The config with the fewest layers."""
    chosen: dict[tuple[object, ...], Path] = {}
    for file in sorted(READY, key=fewest_layers):
        chosen.setdefault(structure(file), file)
    return list(chosen.values())


SHORTEST = shortest_of_each_structure()
OTHERS = [file for file in READY if file not in SHORTEST]


def exchanging_groups(file: Path) -> set[str]:
    """The groups within a replica, by their names in a record, that the config's layout gives
    more than one rank.
    """
    parallel = load_config(file).parallel
    sizes = {
        "tp": parallel.tensor_model_parallel_size,
        "cp": parallel.context_parallel_size,
        "ep": parallel.expert_model_parallel_size,
    }
    return {name for name, size in sizes.items() if size > 1}


def short(file: Path) -> list[str]:
    """Two micro-batches of two short sequences: the code of a step does not depend on their
    number, its time does.
    """
    batch = 4 * load_config(file).parallel.data_parallel_size(processes(file))
    sizes = LENGTHS | {
        "training.max_tokens_per_micro_batch": 4224,
        "training.global_batch_size": batch,
    }
    return [f"{key}={value}" for key, value in sizes.items()]


def rehearse(file: Path, output: Path, *arguments: str) -> dict:
    """The rehearsal's JSON document; it must find no problem."""
    model = SHIPPED[Path(load_config(file).model.path).name]
    world = str(processes(file))
    code = main(
        [str(file), f"model.path={model}", "--world", world, "--json", str(output), *arguments]
    )
    document = json.loads(output.read_text())
    assert document["problems"] == [] and code == 0
    return document


@pytest.mark.parametrize("file", SHORTEST, ids=lambda file: file.stem)
def test_one_of_each_structure(file, tmp_path):
    rehearse_the_fewest_layers(file, tmp_path)


@pytest.mark.parametrize("file", OTHERS, ids=lambda file: file.stem)
def test_the_others(file, tmp_path):
    rehearse_the_fewest_layers(file, tmp_path)


def rehearse_the_fewest_layers(file: Path, folder: Path) -> None:
    layers = fewest_layers(file)
    assert layers == next((number for word, number in FEWEST.items() if word in file.stem), 2)
    # Of the first stage, and of the last.
    ranks = (
        "0"
        if load_config(file).parallel.pipeline_model_parallel_size == 1
        else f"0,{processes(file) - 1}"
    )
    document = rehearse(
        file, folder / "found.json", "--layers", str(layers), "--ranks", ranks, *short(file)
    )
    for role in document["roles"]:
        assert 0 < role["peak_activation_bytes"] < role["peak_bytes"]
        assert {collective["group"] for collective in role["collectives"]} >= exchanging_groups(
            file
        )


@pytest.mark.parametrize("file", READY, ids=lambda file: file.stem)
def test_in_full(file, tmp_path):
    document = rehearse(
        file, tmp_path / "found.json", "--gpu", "h200" if "141gb" in file.stem else "h100"
    )
    assert sorted(rank for role in document["roles"] for rank in role["stands_for"]) == list(
        range(processes(file))
    )
    assert exchanging_groups(file) | {"world"} <= set(document["compared_groups"])
