"""PEFT's files: the layout of fused experts by a loop, round trips, and files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_gspo.models import ModelError
from megatron_gspo.models.peft_files import AdapterFacts, can_fuse, read_adapters, write_adapters

FACTS = AdapterFacts(rank=2, alpha=3.0, rslora=True, base="somewhere", checksum="0123")
LAYER = "model.layers.0"
SIZES = {"gate_proj": (5, 4), "up_proj": (5, 4), "down_proj": (4, 5)}  # out, in


def adapters(names: tuple[str, ...] = tuple(SIZES)) -> dict[str, Tensor]:
    g, found = torch.Generator().manual_seed(0), {}
    for name in [f"mlp.experts.{e}.{n}" for e in range(3) for n in names] + ["self_attn.q_proj"]:
        out, inputs = SIZES.get(name.rpartition(".")[2], (6, 4))
        found[f"{LAYER}.{name}.lora_A.weight"] = torch.randn(2, inputs, generator=g)
        found[f"{LAYER}.{name}.lora_B.weight"] = torch.randn(out, 2, generator=g)
    return found


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
        found = b.reshape(10, 4, 3)[:, :, e] @ a.reshape(3, 4, 4)[e]  # as PEFT takes them apart
        assert torch.allclose(found, torch.cat([one("gate_proj"), one("up_proj")]), atol=1e-6)
        a, b = (stored[f"{prefix}.lora_{w}.weight"] for w in "AB")
        assert torch.allclose(b.reshape(4, 2, 3)[:, :, e] @ a.reshape(3, 2, 5)[e], one("down_proj"), atol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_files_are_read_as_they_were_written(tmp_path: Path, fused: bool) -> None:
    tensors = adapters()
    for _ in range(2):  # the second replaces the first
        write_adapters(tmp_path / "a", tensors, FACTS, fused=fused)
    found, facts = read_adapters(tmp_path / "a")
    assert facts == FACTS and set(found) == set(tensors)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
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
    assert (tmp_path / "adapters.kept").is_symlink() and list((tmp_path / "elsewhere").iterdir()) == []
