"""--build-only: what a start would refuse is refused, and what it would build is counted,
without a world.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_gspo.config import Config, ConfigError
from megatron_gspo.models import family_of, read_config
from megatron_gspo.tools.rehearse.__main__ import main
from megatron_gspo.tools.rehearse.build_only import build_stages
from tests.support.tiny_models import save_tiny_model
from tests.support.training_runs import base_config


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "moe")


def make(model: str, folder, **sections) -> Config:
    return Config.from_dict(base_config(model, folder / "run", **sections))


def test_counts_what_each_stage_holds(model, tmp_path):
    config = make(
        model,
        tmp_path,
        parallel={"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
    )
    stages = build_stages(config, 8)
    assert [(stage.stage, stage.rank, stage.layers) for stage in stages] == [(0, 0, 2), (1, 4, 2)]
    _, shape = family_of(read_config(model))
    expert = 3 * shape.hidden_size * shape.moe_ffn_hidden_size
    assert [stage.expert_parameters for stage in stages] == [
        2 * expert * shape.num_experts // 2
    ] * 2
    assert not dist.is_initialized()


def test_indexers_are_counted_as_frozen(tmp_path):
    """Queries of the latent, keys and weights of the hidden state, the keys' norm; whole on each
    tensor-parallel rank."""
    path = save_tiny_model(tmp_path / "sparse", kind="glm_dsa")
    config = make(path, tmp_path, parallel={"tensor_model_parallel_size": 2})
    [stage] = build_stages(config, 2)
    facts = read_config(path)
    heads, size, hidden = (facts[key] for key in ("index_n_heads", "index_head_dim", "hidden_size"))
    indexer = heads * size * facts["q_lora_rank"] + (size + heads) * hidden + 2 * size
    assert stage.frozen_parameters == facts["num_hidden_layers"] * indexer


def test_the_command_line(model, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(make(model, tmp_path).to_yaml())
    assert (
        main([str(config), "--world", "4", "--build-only", "parallel.expert_model_parallel_size=4"])
        == 0
    )
    assert "EP 4" in (out := capsys.readouterr().out) and "can start" in out
    assert not (tmp_path / "run").exists()
    for arguments, says in (
        (["--world", "3", "parallel.expert_model_parallel_size=4"], "does not divide 3 processes"),
        (["--world", "2", "model.path=/nowhere"], '"/nowhere": is not a directory'),
    ):
        assert main([str(config), "--build-only", *arguments]) == 2
        assert says in capsys.readouterr().err


def test_a_layout_that_does_not_fit_is_a_config_error(model, tmp_path):
    config = make(model, tmp_path, parallel={"pipeline_model_parallel_size": 3})
    with pytest.raises(ConfigError, match="num_hidden_layers = 4"):
        build_stages(config, 3)
