"""Adapters in and out: PEFT loads what is exported and scores the same, merged weights are
PEFT's, in two layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

import megatron_gspo.mcore.train_step  # noqa: F401  the fork server of the tests imports it once
from megatron_gspo.config import LoRAConfig
from megatron_gspo.mcore.policy import TrainedParts, build_policy
from megatron_gspo.models.peft_files import AdapterFacts, read_adapters, write_adapters
from tests.equivalence.lora import ADAPTERS
from tests.equivalence.measure import MODELS
from tests.support.configs import adam, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.peft_reference import adapted, adapter_tensors
from tests.support.tiny_models import save_tiny_model
from tests.support.transformers_reference import checkpoint_tensors, load_reference

LAYOUTS = (parallel(tensor=2, expert=2), parallel(pipeline=2, expert_tensor=2, expert=1, tensor=2))


@dataclass(frozen=True)
class Exported:
    """What a rank exports in one layout: the adapters as they began, then those of the file, to all
    ranks and to the sources alone, and the merged weights.
    """

    initial: dict[str, Tensor]
    everywhere: dict[str, Tensor]
    by_sources: dict[str, Tensor]
    merged: dict[str, Tensor]
    base_checksum: str


def export_in_every_layout(
    rank: int, world_size: int, path: str, lora: LoRAConfig, file: Path
) -> list[Exported]:
    tensors = load_file(file)
    exported = []
    for layout in LAYOUTS:
        policy = build_policy(
            model_config(path),
            layout,
            groups_of(layout),
            optimizer=adam(1e-3),
            parts=TrainedParts(lora=lora, seed=3),
        )
        initial = {name: tensor.clone() for name, tensor in policy.adapters()}
        policy.set_adapters(lambda name, sizes: tensors[name])
        by_sources: dict[str, Tensor] = {}
        for source in policy.sources:
            by_sources |= {name: tensor.clone() for name, tensor in policy.adapters(source)}
        merged = {name: tensor.clone() for name, tensor in policy.weights()}
        exported.append(
            Exported(initial, dict(policy.adapters()), by_sources, merged, policy.base_checksum())
        )
    return exported


@pytest.fixture(scope="module", params=["each", "shared", "router", "latent"])
def case(request, tmp_path_factory) -> dict[str, Any]:
    kind = ADAPTERS[f"lora_{request.param}"]
    name = kind.model
    lora = kind.lora
    folder = tmp_path_factory.mktemp(request.param)
    path = save_tiny_model(folder / "model", **MODELS[name])
    model = adapted(load_reference(path).float(), path, lora)
    tensors = {
        name: t.clone()
        for name, t in adapter_tensors(model, torch.Tensor.detach, rank=lora.rank).items()
    }
    file = folder / "tensors.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return dict(
        kind=request.param,
        path=path,
        lora=lora,
        model=model,
        tensors=tensors,
        folder=folder,
        ranks=run_distributed(export_in_every_layout, 4, path, lora, file),
    )


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def exports(case: dict[str, Any]) -> list[Exported]:
    """Of all ranks and layouts."""
    return [exported for rank in case["ranks"] for exported in rank]


def test_streams_have_every_adapter_in_every_layout(case):
    tensors = case["tensors"]
    initial = case["ranks"][0][0].initial
    for ranks in zip(*case["ranks"], strict=True):  # of one layout
        sent: dict[str, Tensor] = {}
        for exported in ranks:
            assert_equal(exported.everywhere, tensors)
            assert not set(exported.by_sources) & set(sent), "sent twice"
            sent |= exported.by_sources
            assert_equal(exported.initial, initial)
        assert_equal(sent, tensors)
    for name, tensor in initial.items():
        bound = tensor.shape[1] ** -0.5 if ".lora_A." in name else 0.0
        assert float(tensor.abs().max()) <= bound and bool(tensor.any()) == (bound > 0)


def test_merged_weights_are_those_of_peft(case):
    if case["kind"] == "shared":  # which PEFT doesn't have
        scale = case["lora"].scale
        base = checkpoint_tensors(load_reference(case["path"]).float(), torch.Tensor.detach)
        wanted = dict(base)
        for name in case["tensors"]:
            if ".lora_A." in name:
                b = case["tensors"][name.replace("lora_A", "lora_B")]
                weight = name.replace(".lora_A", "")
                wanted[weight] = base[weight] + (b @ case["tensors"][name]) * scale
    else:
        wanted = checkpoint_tensors(case["model"].merge_and_unload(), torch.Tensor.detach)
    for exported in exports(case):
        assert set(exported.merged) == set(wanted)
        for name, tensor in exported.merged.items():
            # A product's last bits.
            assert torch.allclose(tensor, wanted[name], rtol=0, atol=5e-7), name


def test_the_checksum_is_one_for_every_layout_and_another_for_other_weights(case):
    (checksum,) = {exported.base_checksum for exported in exports(case)}
    assert len(checksum) == 16 and int(checksum, 16)


@pytest.mark.parametrize("fused", [True, False])
def test_peft_loads_the_files_and_scores_the_same(case, fused):
    if case["kind"] == "shared" and fused:
        pytest.skip("as files for each expert they are those of `each`")
    lora = case["lora"]
    folder = case["folder"] / f"adapters_{fused}"
    facts = AdapterFacts(lora.rank, lora.alpha, lora.rslora, base=case["path"], checksum="ab")
    write_adapters(folder, case["tensors"], facts, fused=fused)
    tensors, facts_read = read_adapters(folder)
    assert facts_read == facts
    assert_equal(tensors, case["tensors"])
    if not fused:
        return
    fresh = load_reference(case["path"])
    loaded = PeftModel.from_pretrained(fresh, str(folder))
    tokens = torch.arange(2, 40)[None]
    case_model = adapted(load_reference(case["path"]).float(), case["path"], lora).double()
    with torch.no_grad():
        logits = loaded(input_ids=tokens, use_cache=False).logits
        expected = case_model(input_ids=tokens, use_cache=False).logits
        with loaded.disable_adapter():
            base = loaded(input_ids=tokens, use_cache=False).logits
    assert (logits - expected).abs().max() < 1e-5
    assert (logits - base).abs().max() > 1e-2
    assert Path(folder / "adapter_config.json").is_file()
