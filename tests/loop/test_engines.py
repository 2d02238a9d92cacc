"""The source of groups of a config, in one process; servers are in `tests/rollout` and
`tests/sglang`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_gspo.agents.agent_host import RunRequest
from megatron_gspo.config import Config, ConfigError
from megatron_gspo.data.sample import Sample
from megatron_gspo.environments.episodes import EpisodeEngine
from megatron_gspo.loop.engines import (
    agent_process,
    build_sources,
    embedded_engine,
    perturb_rollout,
    stop_ids,
    with_update_arguments,
)
from megatron_gspo.rewards.scorer import FAILURE
from megatron_gspo.rollout.in_process_source import InProcessSource
from megatron_gspo.rollout.sft_engine import DemonstrationEngine
from tests.support.agent_endpoint import TOKENIZER
from tests.support.collapse_noise import noise_of
from tests.support.model_shapes import dense_shape
from tests.support.reference_models import checkpoint, dense_config, loaded_engine, reference_model
from tests.support.samples import CharTokenizer, make_prompt
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_generator import ScriptedGenerator
from tests.support.scripted_servers import scripted_response
from tests.support.training_runs import base_config, tiny_model

SFT = {
    "algorithm": {"name": "sft"},
    "rollout": {"engine": "sft", "n_samples_per_prompt": 1},
    "training": {"global_batch_size": 4},
}
SHAPE = dense_shape(vocab_size=1000)
NO_ENVIRONMENTS: Any = None


class Tokenizer(CharTokenizer):
    eos_token_id = 2


def config(model: str | Path = "model", /, **sections: Any) -> Config:
    return Config.from_dict(base_config(str(model), Path("run"), **sections))


def sources(
    made: Config, *, evaluates: bool, given: Any = None, environments: Any = NO_ENVIRONMENTS
) -> Any:
    return build_sources(made, SHAPE, Tokenizer(), environments, evaluates=evaluates, given=given)


def engine_of(source: Any) -> Any:
    assert isinstance(source, InProcessSource)
    return source._engine


def test_a_given_engine_replaces_the_configured_one() -> None:
    given = ScriptedEngine(lambda prompt, number, seed: scripted_response(prompt, number, 0))
    training, held_out = sources(config(), evaluates=True, given=given)
    assert training is held_out and engine_of(training) is given
    assert training.engine_name.endswith("ScriptedEngine")
    assert sources(config(), evaluates=False, given=given)[1] is None
    batch = training.generate([make_prompt(3)], config().rollout, seed=0)
    assert [sample.prompt_index for sample in batch.samples] == [3] * 4


def test_supervised_training_has_a_source_of_its_own_for_held_out_samples() -> None:
    given = ScriptedEngine({})
    training, held_out = sources(config(**SFT), evaluates=True, given=given)
    assert training is not held_out and engine_of(training) is engine_of(held_out) is given
    training, held_out = sources(config(**SFT), evaluates=False)
    assert isinstance(engine_of(training), DemonstrationEngine) and held_out is None


def test_environments_play_on_the_engine() -> None:
    given = ScriptedEngine({})
    made = config(data={"verifier": None}, rollout={"environment": "mine.py:make"})
    training, _ = sources(
        made, evaluates=False, given=given, environments=SimpleNamespace(step=None, close=None)
    )
    assert isinstance(engine_of(training), EpisodeEngine)
    assert training.engine_name.endswith("ScriptedEngine")


def test_the_interpreter_of_an_environment_stays_the_command_of_an_agent(tmp_path: Path) -> None:
    """It is a link, whose path tells Python which packages to load."""
    environment = tmp_path / "environment" / "bin" / "python"
    environment.parent.mkdir(parents=True)
    environment.symlink_to(sys.executable)
    command = [str(environment), "-c", "import sys; sys.exit(sys.executable)"]
    config_file = tmp_path / "config.json"
    config_file.write_text(json.dumps({"eos_token_id": TOKENIZER.eos_token_id}))
    made = config(tmp_path, data={"verifier": None}, agents={"command": command})
    host = agent_process(made, dense_shape(vocab_size=len(TOKENIZER)), TOKENIZER)

    async def play() -> list[Sample]:
        generator = ScriptedGenerator(TOKENIZER, lambda prompt, seed: "")
        try:
            return await host.samples([RunRequest(make_prompt(3), 0, seed=1)], generator, 8)
        finally:
            await host.close()

    [sample] = asyncio.run(play())
    assert f"exit code 1: {environment})" in sample.metadata[FAILURE]


def test_routers_that_cannot_be_perturbed_are_a_config_error() -> None:
    noise = noise_of(strength=0.5)
    with pytest.raises(
        ConfigError,
        match='^routing.perturbation = ".*noise": the routers of ScriptedEngine cannot be',
    ):
        perturb_rollout(ScriptedEngine({}), noise)
    dense = loaded_engine(dense_config(), checkpoint(reference_model(dense_config())))
    with pytest.raises(
        ConfigError, match="model type qwen3 has no softmax router .*; remove the key"
    ):
        perturb_rollout(dense, noise)
    perturb_rollout(None, noise)  # servers: the trainer's alone


def test_the_embedded_engine_reads_no_weights_and_ends_at_the_end_tokens_of_the_model(
    tmp_path: Path,
) -> None:
    """Its weights come with the first update, so that they are not read twice."""
    made = config(tiny_model(tmp_path / "model"))
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()
    tokenizer = SimpleNamespace(eos_token_id=4)
    engine = embedded_engine(made, SHAPE, tokenizer)
    assert engine.weight_version is None and engine.eos_token_ids == (3, 4, 5)


def test_a_model_that_the_engine_refuses_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no such layer\nmore")

    monkeypatch.setattr("megatron_gspo.loop.engines.EmbeddedEngine", refuse)
    with pytest.raises(
        ConfigError, match="^model.path = .*the embedded engine refuses it: no such layer; fix it"
    ):
        embedded_engine(config(tiny_model(tmp_path / "model")), SHAPE, Tokenizer())


def test_end_tokens_are_the_generation_configs_else_the_configs(tmp_path: Path) -> None:
    def write(name: str, **content: Any) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps(content))

    write("config", eos_token_id=7)
    assert 7 in stop_ids(str(tmp_path), Tokenizer(), 1000)
    write("generation_config", eos_token_id=[8, 9])
    end_tokens = stop_ids(str(tmp_path), Tokenizer(), 1000)
    assert {8, 9} <= set(end_tokens) and 7 not in end_tokens
    write("generation_config", temperature=1.0)
    assert 7 in stop_ids(str(tmp_path), Tokenizer(), 1000), "a file without the key"


def test_a_model_without_an_end_token_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="set eos_token_id in its config.json"):
        stop_ids(str(tmp_path), SimpleNamespace(eos_token_id=None), 1000)


def test_servers_of_quantised_weights_start_without_any(tmp_path):
    """Their own arguments come last, so that they win; a config without quantization is
    unchanged.
    """
    model = tiny_model(tmp_path / "model")
    lists = {
        "modules": ["model.layers.*.mlp.experts.*.*"],
        "exclude": ["model.layers.*.self_attn.*", "model.layers.*.mlp.gate", "lm_head"],
    }
    servers = {"num_servers": 1, "server_args": ["--tp", "2"]}
    rollout = {"engine": "sglang", "quantization": {"format": "fp8_block", **lists}}
    made = with_update_arguments(config(model, rollout=rollout, sglang=servers))
    option, text, *rest = made.sglang.server_args
    assert option == "--json-model-override-args"
    assert rest == [
        "--load-format",
        "dummy",
        "--tp",
        "2",
    ]
    quantization = json.loads(text)["quantization_config"]
    assert quantization["quant_method"] == "fp8"
    assert "model.layers.0.self_attn.q_proj" in quantization["modules_to_not_convert"]
    plain = config(model, rollout={"engine": "sglang"}, sglang=servers)
    assert with_update_arguments(plain) is plain


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (
            "sglang",
            [
                "--max-loras-per-batch",
                "1",
                "--max-lora-rank",
                "12",
                "--lora-backend",
                "torch_native",
            ],
        ),
        ("vllm", ["--max-loras", "1", "--max-lora-rank", "16"]),  # the next that vLLM takes
    ],
)
def test_servers_that_get_adapters_alone_start_with_room_for_them(engine, expected, tmp_path):
    model = tiny_model(tmp_path / "model")
    targets = ["q_proj", "o_proj"]
    servers = {"num_servers": 1, "weight_transport": "disk", "server_args": ["--tp", "2"]}
    for given, modules in (
        (targets, targets),
        (None, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    ):
        lora = {"rank": 12, "targets": given, "weight_updates": "adapters"}
        made = with_update_arguments(
            config(model, rollout={"engine": engine}, lora=lora, **{engine: servers})
        )
        args = ["--enable-lora", *expected, "--lora-target-modules", *modules, "--tp", "2"]
        assert list(made.servers.server_args) == args
