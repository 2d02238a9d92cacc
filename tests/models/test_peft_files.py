"""PEFT's files: the layout of fused experts by a loop, round trips, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_gspo.models import ModelError
from megatron_gspo.models.peft_files import AdapterFacts, can_fuse, read_adapters, write_adapters

FACTS = AdapterFacts(rank=2, alpha=3.0, rslora=True, base="somewhere", checksum="0123")
LAYER = "model.layers.0"
WEIGHTS = "adapter_model.safetensors"
SIZES = {"gate_proj": (5, 4), "up_proj": (5, 4), "down_proj": (4, 5)}  # out, in


def adapters(names: tuple[str, ...] = tuple(SIZES)) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    tensors = {}
    for name in [f"mlp.experts.{e}.{n}" for e in range(3) for n in names] + ["self_attn.q_proj"]:
        out, inputs = SIZES.get(name.rpartition(".")[2], (6, 4))
        tensors[f"{LAYER}.{name}.lora_A.weight"] = torch.randn(2, inputs, generator=g)
        tensors[f"{LAYER}.{name}.lora_B.weight"] = torch.randn(out, 2, generator=g)
    return tensors


def test_the_scale_by_hand() -> None:
    assert FACTS.scale == pytest.approx(3.0 / 1.41421356)
    assert AdapterFacts(rank=2, alpha=3.0).scale == 1.5


def test_fused_experts_add_what_each_adds(tmp_path: Path) -> None:
    tensors = adapters()
    write_adapters(tmp_path / "a", tensors, FACTS, fused=True)
    stored = load_file(tmp_path / "a" / "adapter_model.safetensors")
    prefix = f"base_model.model.{LAYER}.mlp.experts"
    for e in range(3):

        def one(name: str, e: int = e) -> Tensor:
            low, high = (tensors[f"{LAYER}.mlp.experts.{e}.{name}.lora_{w}.weight"] for w in "AB")
            return high @ low

        a, b = (stored[f"{prefix}.base_layer.lora_{w}.weight"] for w in "AB")
        added = b.reshape(10, 4, 3)[:, :, e] @ a.reshape(3, 4, 4)[e]  # as PEFT takes them apart
        assert torch.allclose(added, torch.cat([one("gate_proj"), one("up_proj")]), atol=1e-6)
        a, b = (stored[f"{prefix}.lora_{w}.weight"] for w in "AB")
        assert torch.allclose(
            b.reshape(4, 2, 3)[:, :, e] @ a.reshape(3, 2, 5)[e], one("down_proj"), atol=1e-6
        )


@pytest.mark.parametrize("fused", [True, False])
def test_files_are_read_as_they_were_written(tmp_path: Path, fused: bool) -> None:
    tensors = adapters()
    for _ in range(2):  # the second replaces the first
        write_adapters(tmp_path / "a", tensors, FACTS, fused=fused)
    restored, facts = read_adapters(tmp_path / "a")
    assert facts == FACTS and set(restored) == set(tensors)
    assert all(torch.equal(restored[name], tensors[name]) for name in tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_part_of_the_experts_goes_to_servers_only(tmp_path: Path) -> None:
    tensors = adapters(("up_proj",))
    assert can_fuse(adapters()) and not can_fuse(tensors)
    with pytest.raises(ModelError, match="no adapters of gate_proj: write it for servers"):
        write_adapters(tmp_path / "a", tensors, FACTS, fused=True)
    write_adapters(tmp_path / "a", tensors, FACTS, fused=False)
    assert set(read_adapters(tmp_path / "a")[0]) == set(tensors)


def test_another_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no adapters in PEFT's format"):
        read_adapters(tmp_path)


def test_a_link_where_adapters_go_is_kept(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "adapters").symlink_to(tmp_path / "elsewhere")
    tensors = {f"model.layers.0.self_attn.q_proj.lora_{m}.weight": torch.ones(2, 2) for m in "AB"}
    for _ in range(2):
        write_adapters(tmp_path / "adapters", tensors, AdapterFacts(rank=2, alpha=4.0), fused=False)
    assert read_adapters(tmp_path / "adapters")[0].keys() == tensors.keys()
    assert (tmp_path / "adapters.kept").is_symlink() and list(
        (tmp_path / "elsewhere").iterdir()
    ) == []


def save_one(folder: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    """A directory with adapters of rank 2 and these tensors; config: changes of
    adapter_config.json.
    """
    write_adapters(folder, adapters(), FACTS, fused=False)
    named = {f"base_model.model.{LAYER}.{name}": tensor for name, tensor in tensors.items()}
    save_file(load_file(folder / WEIGHTS) | named, folder / WEIGHTS, {"format": "pt"})
    content = json.loads((folder / "adapter_config.json").read_text()) | config
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(r=None), "adapter_config.json: r=None is no rank; give an integer above 0"),
        (dict(r=10**9), "r=1000000000 is no rank"),
        (dict(lora_alpha=float("nan")), "lora_alpha=nan is not supported"),
        (dict(peft_type="IA3"), "peft_type='IA3' is not supported; known: 'LORA'"),
        (dict(bias="all"), "bias='all' is not supported"),
        (dict(use_dora=True), "use_dora=True is not supported"),
        (
            dict(rank_pattern={"q_proj": 4}),
            "rank_pattern=.* is not supported; give all layers one rank and alpha",
        ),
        (dict(base_model_name_or_path=[1]), "base_model_name_or_path is no text"),
        (dict(r=4), r"is \(2, 5\), which does not go with r=4"),
    ],
)
def test_adapters_that_add_something_else_are_refused(
    config: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read_adapters(save_one(tmp_path / "a", {}, **config))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3, 4), r"is \(3, 4\), which does not go with r=2"),
        (torch.zeros(2), "does not go with r=2"),
        (torch.full((2, 4), float("nan")), "holds NaN or infinity"),
        (torch.zeros(2, 4, dtype=torch.int8), "is stored as int8"),
    ],
)
def test_tensors_that_are_no_adapters_are_named(
    tensor: Tensor, message: str, tmp_path: Path
) -> None:
    name = "self_attn.q_proj.lora_A.weight"
    with pytest.raises(ModelError, match=f"{name} {message}" if message[0] != "d" else message):
        read_adapters(save_one(tmp_path / "a", {name: tensor}))


@pytest.mark.parametrize(
    "content",
    [
        b"[1]",
        b"{",
        b'{"r": 1, "r": 2}',
    ],
)
def test_a_config_of_another_form_is_refused(content: bytes, tmp_path: Path) -> None:
    folder = save_one(tmp_path / "a", {})
    (folder / "adapter_config.json").write_bytes(content)
    with pytest.raises(ModelError, match="adapter_config.json: not valid JSON"):
        read_adapters(folder)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    folder = save_one(tmp_path / "a", {})
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(
        ModelError, match="adapter_model.safetensors: damaged or cut short"
    ) as caught:
        read_adapters(folder)
    assert "\n" not in str(caught.value)
