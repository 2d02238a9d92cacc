"""A policy that starts from adapters in PEFT's format, in another layout than they come from;
what is refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gspo.config import ConfigError, LoRAConfig
from megatron_gspo.loop.adapter_start import start_from_adapters
from megatron_gspo.mcore.policy import Policy, TrainedParts, build_policy
from megatron_gspo.models import ModelError
from megatron_gspo.models.peft_files import AdapterFacts, write_adapters
from tests.support.configs import adam, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model

LORA = LoRAConfig(rank=3, alpha=5.0)
GATE = ".mlp.experts.1.gate_proj.lora_B.weight"


def _policy(path: str, **sizes: int) -> Policy:
    layout = parallel(**sizes)
    return build_policy(
        model_config(path),
        layout,
        groups_of(layout),
        optimizer=adam(1e-3),
        parts=TrainedParts(lora=LORA, seed=len(sizes)),
    )


def _random(name: str, sizes: tuple[int, int]) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def starts(rank: int, world: int, path: str, folder: Path) -> list[Any]:
    """Whether the new policy exports the adapters of the first, and the messages of what is
    refused.
    """
    first = _policy(path, tensor=2)
    first.set_adapters(_random)
    tensors = {name: tensor.clone() for name, tensor in first.adapters()}
    facts = AdapterFacts(3, 5.0, base=path, checksum=first.base_checksum())
    if rank == 0:
        write_adapters(folder / "adapters", tensors, facts, fused=True)
        write_adapters(folder / "of_others", tensors, replace(facts, checksum="0" * 16), fused=True)
        partial = {name: tensor for name, tensor in tensors.items() if not name.endswith(GATE)}
        write_adapters(folder / "partial", partial, facts, fused=False)
    dist.barrier()
    lora = replace(LORA, adapter_path=str(folder / "adapters"))
    policy = _policy(path, expert=2, pipeline=1)
    start_from_adapters(policy, lora)
    outcomes = [{name: torch.equal(tensor, tensors[name]) for name, tensor in policy.adapters()}]
    for other in (
        replace(lora, rank=4),
        replace(lora, alpha=6.0),
        replace(lora, targets=("q_proj", "k_proj")),
        replace(lora, experts="shared"),
        replace(lora, adapter_path=str(folder / "of_others")),
        replace(lora, adapter_path=str(folder / "partial")),
        replace(lora, adapter_path=path),
    ):
        try:
            start_from_adapters(policy, other)
            outcomes.append("")
        except (ConfigError, ModelError) as error:
            outcomes.append(str(error))
    return outcomes


def test_a_policy_starts_from_adapters(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    ranks = run_distributed(starts, 2, path, tmp_path)
    for same, *messages in ranks:
        assert same and all(same.values())
        assert messages[0].startswith(
            "lora.rank = 4: the adapters of lora.adapter_path have 3; set it to 3"
        )
        assert messages[1].startswith("lora.alpha = 6.0: ") and "set it to 5.0" in messages[1]
        assert messages[2].startswith("lora.targets") and "use some of" in messages[2]
        assert messages[3].startswith("lora.experts") and messages[3].endswith("set it to each")
        assert "model.path has" in messages[4]
        assert messages[4].endswith("set model.path to their base")
        assert messages[6].startswith(path) and "holds no adapters in PEFT's format" in messages[6]
    # the rank that holds expert 1 has no use for it
    assert [
        GATE in messages[5] and "no such tensor" in messages[5] for _, *messages in ranks
    ].count(True) >= 1
