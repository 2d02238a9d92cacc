"""Adapters of a run's checkpoint: to PEFT and merged, equal to the bit to what the policy
exports; PEFT's merge.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_gspo.config import LoRAConfig
from megatron_gspo.mcore.checkpoint.save_load import save_checkpoint
from megatron_gspo.mcore.policy import TrainedParts, build_policy
from megatron_gspo.models.hf_checkpoint import CheckpointReader
from megatron_gspo.models.peft_files import AdapterFacts, read_adapters, write_adapters
from megatron_gspo.tools.convert.__main__ import main
from tests.support.configs import adam, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.saved_policies import STATE
from tests.support.tiny_models import save_tiny_model
from tests.support.transformers_reference import checkpoint_tensors

LORA = {
    "each": LoRAConfig(rank=3, alpha=5.0),
    "shared": LoRAConfig(
        rank=2, alpha=4.0, rslora=True, experts="shared", targets=("k_proj", "up_proj")
    ),
}


def save(rank: int, world: int, path: str, runs: dict[str, Path]) -> list[Any]:
    """Checkpoints of TP 2 and EP 2 with random adapters; what the policies export."""
    layout = parallel(tensor=2, expert=2)
    saved_exports = []
    for name, run in runs.items():
        policy = build_policy(
            model_config(path, dtype="bfloat16"),
            layout,
            groups_of(layout),
            optimizer=adam(1e-3),
            parts=TrainedParts(lora=LORA[name], seed=3),
        )
        policy.set_adapters(_random)
        save_checkpoint(policy, run / "checkpoints", 1, STATE, keep=1)
        exports = (policy.adapters(), policy.weights())
        saved_exports.append(
            [{name: tensor.clone() for name, tensor in stream} for stream in exports]
        )
    return saved_exports


def _random(name: str, sizes: tuple[int, int]) -> Tensor:
    return torch.randn(
        sizes,
        generator=torch.Generator().manual_seed(len(name) + 7 * sizes[0] + sum(map(ord, name))),
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("adapters")
    path = save_tiny_model(folder / "base", dtype=torch.bfloat16)
    runs = {name: folder / name for name in LORA}
    exports = run_distributed(save, 2, path, runs)[0]
    for name, run in runs.items():
        lora = LORA[name]
        section = dict(rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora, experts=lora.experts)
        section |= {} if lora.targets is None else {"targets": list(lora.targets)}
        (run / "config.yaml").write_text(yaml.safe_dump({"model": {"path": path}, "lora": section}))
    return dict(path=path, runs=runs, exports=dict(zip(runs, exports, strict=True)))


@pytest.mark.parametrize("name", LORA)
@pytest.mark.parametrize("options", [[], ["--by-expert"]], ids=["fused", "by-expert"])
def test_adapters_are_those_of_the_policy(
    saved: dict[str, Any],
    name: str,
    options: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["to-peft", str(saved["runs"][name]), str(tmp_path / "peft"), "--verify", *options])
    adapters, facts = read_adapters(tmp_path / "peft")
    _same(adapters, saved["exports"][name][0])
    assert f"{len(adapters)} tensors are equal, bit for bit" in capsys.readouterr().err
    lora = LORA[name]
    assert (facts.rank, facts.alpha, facts.rslora, facts.base) == (
        lora.rank,
        lora.alpha,
        lora.rslora,
        saved["path"],
    )
    assert len(facts.checksum) == 16
    stored = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert any(".experts.0." in each for each in stored) == (bool(options) or name == "shared")


@pytest.mark.parametrize("name", LORA)
def test_merged_weights_are_those_of_the_policy(
    saved: dict[str, Any], name: str, tmp_path: Path
) -> None:
    main(["merge", str(saved["runs"][name]), str(tmp_path / "merged")])
    main(
        [
            "to-peft",
            str(saved["runs"][name] / "checkpoints" / "step_000001"),
            str(tmp_path / "peft"),
        ]
    )
    main(["merge", str(tmp_path / "peft"), str(tmp_path / "again")])
    for folder in ("merged", "again"):
        _same(_weights(tmp_path / folder), saved["exports"][name][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_are_those_of_peft(
    saved: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Of linear layers to the bit. PEFT multiplies fused experts in another order, and in bfloat16
    rounds the product, the scaled product and the sum, of which ours has the last two."""
    kind = str(dtype).removeprefix("torch.")
    main(["to-peft", str(saved["runs"]["each"]), str(tmp_path / "peft")])
    main(["merge", str(tmp_path / "peft"), str(tmp_path / "merged"), "--dtype", kind])
    base = AutoModelForCausalLM.from_pretrained(saved["path"], dtype=dtype)
    model = PeftModel.from_pretrained(
        base, str(tmp_path / "peft"), autocast_adapter_dtype=False
    ).merge_and_unload()
    truth = checkpoint_tensors(model, torch.Tensor.detach)
    merged = _weights(tmp_path / "merged")
    before = _weights(Path(saved["path"]))
    assert merged.keys() == truth.keys()
    for name, tensor in merged.items():
        assert tensor.dtype == dtype
        if ".experts." in name and dtype == torch.float32:
            assert torch.allclose(tensor, truth[name], rtol=0, atol=1e-6), name
        elif ".experts." in name:
            added = truth[name].float() - before[name].float()
            limit = torch.finfo(dtype).eps / 2 * (3 * added.abs() + 2 * truth[name].float().abs())
            assert bool(((tensor.float() - truth[name].float()).abs() <= limit).all()), name
        else:
            assert torch.equal(tensor, truth[name]), name


def test_what_can_t_be_converted_is_one_line(
    saved: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saved["runs"]["each"]
    other = save_tiny_model(tmp_path / "other", "dense")
    tensors = {
        f"model.layers.9.self_attn.q_proj.lora_{which}.weight": torch.zeros(2, 2) for which in "AB"
    }
    write_adapters(
        tmp_path / "strange", tensors, AdapterFacts(2, 2.0, base=saved["path"]), fused=False
    )
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("precious")
    capsys.readouterr()
    for arguments, what in (
        (["to-hf", run, tmp_path / "out"], "holds adapters; use convert merge"),
        (["to-peft", run, tmp_path / "there"], "there exists; remove it or choose another output"),
        (["merge", run, tmp_path / "there"], "there exists; remove it or choose another output"),
        (["to-peft", run, tmp_path / "out", "--source", other], "it is not of config.json's model"),
        (
            ["merge", tmp_path / "strange", tmp_path / "out"],
            "has no model.layers.9.self_attn.q_proj.weight",
        ),
        (
            ["merge", other, tmp_path / "out"],
            "is neither a distributed checkpoint nor a run directory",
        ),
    ):
        with pytest.raises(SystemExit) as exit:
            main([*map(str, arguments)])
        text = capsys.readouterr().err
        assert exit.value.code == 2 and what in text and text.count("\n") == 1, text
    assert (
        not (tmp_path / "out").exists() and (tmp_path / "there" / "mine").read_text() == "precious"
    )


def _weights(folder: Path) -> dict[str, Tensor]:
    with CheckpointReader(folder) as reader:
        return {name: reader.read(name) for name in reader.names}


def _same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor) and actual[name].dtype == tensor.dtype, name
