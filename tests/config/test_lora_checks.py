"""What adapters don't go with; see also tests/bad_input."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.family_pages.facts import EXAMPLES
from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model
from tests.config.building import build, refused


@pytest.mark.parametrize(
    ("override", "key", "fix"),
    [
        ("lora.dropout=0.1", "lora.dropout = 0.1", "set it to 0"),
        ("model.implementation=transformer_engine", "model.implementation", "set it to torch"),
        ("model.init=random", "model.init", "set it to pretrained"),
        ("model.expert_bias_update_rate=0.001", "model.expert_bias_update_rate", "set it to 0.0"),
    ],
)
def test_refused_choices(plain: dict, override: str, key: str, fix: str) -> None:
    message = refused(plain, "lora.rank=8", "model.init=pretrained", override)
    assert message.startswith(key) and message.endswith(fix), message


def test_without_adapters_dropout_and_a_start_are_refused(plain: dict) -> None:
    assert build(plain, "model.init=random").trained_lora is None
    assert refused(plain, "lora.dropout=0.1").startswith("lora.dropout")
    assert refused(plain, "lora.adapter_path=somewhere").startswith(
        "lora.rank = 0: lora.adapter_path has adapters"
    )


@pytest.mark.parametrize("targets", ["[q_proj, gates]", "[]", "[lm_head]"])
def test_targets_are_linear_layers_of_the_model(plain: dict, tmp_path: Path, targets: str) -> None:
    write_tiny_model(tmp_path / "tiny", TinyModel(layers=1, experts=2))
    on = ("lora.rank=8", "model.init=pretrained", f"model.path={tmp_path / 'tiny'}")
    build(plain, *on, "lora.targets=[q_proj, up_proj]").check_sizes(1)
    message = refused(plain, *on, f"lora.targets={targets}", world_size=1)
    assert message.startswith("lora.targets")
    assert message.endswith("gate_proj, up_proj, down_proj, gate"), message


@pytest.mark.parametrize("name", ["in_proj", "out_proj", "conv1d"])
def test_projections_of_mamba_have_no_adapters(plain: dict, name: str) -> None:
    model = EXAMPLES / "nemotron_h" / "models" / "Nemotron-3-Nano-30B-A3B"
    on = ("lora.rank=8", "model.init=pretrained", f"model.path={model}")
    build(plain, *on, "lora.targets=[q_proj, up_proj, down_proj]").check_sizes(1)
    message = refused(plain, *on, f"lora.targets=[q_proj, {name}]", world_size=1)
    assert message.startswith("lora.targets") and f"{name} is no linear layer" in message


def test_servers_have_no_adapters_of_routers(plain: dict, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny", TinyModel(layers=1, experts=2))
    on = (
        "lora.rank=8",
        "model.init=pretrained",
        f"model.path={tmp_path / 'tiny'}",
        "lora.targets=[q_proj, gate]",
    )
    build(plain, *on, *SGLANG).check_sizes(1)
    message = refused(plain, *on, *SGLANG, "lora.weight_updates=adapters", world_size=1)
    assert "can't add an adapter to gate, the router" in message, message
    assert message.endswith("set lora.weight_updates to merged")


SGLANG = ("rollout.engine=sglang", "sglang.urls=[http://a:1]", "sglang.weight_transport=disk")
VLLM = ("rollout.engine=vllm", "vllm.urls=[http://a:1]", "vllm.weight_transport=disk")


@pytest.mark.parametrize(
    ("overrides", "problem", "fix"),
    [
        ((*SGLANG, "lora.rank=0"), "there are no adapters", "set it to merged"),
        ((), "the embedded engine has no adapters", "set it to merged"),
        (
            (*SGLANG, "sglang.weight_transport=distributed"),
            "which adapters alone don't have",
            "to disk or tensor",
        ),
        (
            (*VLLM, "vllm.weight_transport=distributed"),
            "which adapters alone don't have",
            "set vllm.weight_transport to disk",
        ),
        (
            (*SGLANG, "rollout.quantization.format=int8", "rollout.quantization.modules=[lm_head]"),
            "the base is not sent",
            "set it to merged",
        ),
        (
            (*VLLM, "vllm.weight_checksums=true"),
            "sets the weights to zero",
            "set vllm.weight_checksums to false",
        ),
    ],
)
def test_what_updates_of_adapters_alone_need(
    plain: dict, overrides: tuple[str, ...], problem: str, fix: str
) -> None:
    given = ("lora.rank=8", "model.init=pretrained", "lora.weight_updates=adapters")
    for servers in (SGLANG, (*SGLANG, "sglang.weight_transport=tensor"), VLLM):
        assert build(plain, *given, *servers).lora.weight_updates == "adapters"
    message = refused(plain, *given, *overrides)
    assert message.startswith('lora.weight_updates = "adapters"')
    assert problem in message
    assert message.endswith(fix)
