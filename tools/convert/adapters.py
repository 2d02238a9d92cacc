"""Adapters out of a Megatron checkpoint: to PEFT's format, and merged into their base. All of them
are in host memory, the base is streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_gspo.config import LoRAConfig
from megatron_gspo.config.load import read_file
from megatron_gspo.config.validate import validate
from megatron_gspo.mcore.checkpoint.checkpoint_files import STATE
from megatron_gspo.mcore.checkpoint.checkpoint_metadata import adapter_chunks
from megatron_gspo.models.adapter_rules import add_product
from megatron_gspo.models.checkpoint_checks import check_checkpoint
from megatron_gspo.models.companions import companions
from megatron_gspo.models.families import carried_names, family_of
from megatron_gspo.models.hf_checkpoint import CheckpointReader, write_checkpoint
from megatron_gspo.models.model_shape import ModelError, read_config
from megatron_gspo.models.peft_files import AdapterFacts, can_fuse, read_adapters, write_adapters
from megatron_gspo.tools.convert.to_hugging_face import as_stored, by_part, read_part
from megatron_gspo.tools.convert.torch_dcp_files import open_checkpoint
from megatron_gspo.tools.convert.work_directory import check_output


@dataclass(frozen=True)
class Adapters:
    """Whole tensors by PEFT's names without its prefix, experts one by one, and what they have
    in common.
    """

    tensors: Mapping[str, Tensor]
    facts: AdapterFacts


def adapters_of_run(path: Path, checkpoint: Path) -> LoRAConfig | None:
    """The `lora` section of the run that has the checkpoint, if it trains adapters.

    path: of the run or checkpoint.
    """
    run = path if (path / "config.yaml").is_file() else checkpoint.parent.parent
    if not (run / "config.yaml").is_file():
        return None
    lora = validate(LoRAConfig, read_file(run / "config.yaml").get("lora") or {})
    return lora if lora.is_on else None


def read_megatron(checkpoint: Path, lora: LoRAConfig, source: Path) -> Adapters:
    """The adapters of a distributed checkpoint. source: their base, a Hugging Face directory.

    Raises ``ModelError`` that names a tensor which is missing, extra or of the wrong shape.
    """
    family, shape = family_of(read_config(source))
    reader = open_checkpoint(checkpoint)
    chunks = as_stored(reader, adapter_chunks(family, shape, lora))
    reader.check({chunk.key for chunk in chunks})
    tensors: dict[str, Tensor] = {}
    for of_part in by_part(chunks).values():
        tensors |= of_part[0].part.split(read_part(reader, of_part), shape)
    state = checkpoint / STATE
    checksum = (
        json.loads(state.read_text(encoding="utf-8")).get("base", "") if state.is_file() else ""
    )
    return Adapters(
        tensors, AdapterFacts(lora.rank, lora.alpha, lora.rslora, str(source), checksum)
    )


def write_peft(adapters: Adapters, out: Path, *, by_expert: bool) -> Path:
    """Write a PEFT directory, for Transformers, or with ``by_expert`` for servers.

    Returns ``out``.
    """
    check_output(out)
    write_adapters(
        out, adapters.tensors, adapters.facts, fused=not by_expert and can_fuse(adapters.tensors)
    )
    return out


def compare(adapters: Adapters, folder: Path) -> int:
    """The number of tensors, which the PEFT directory has bit for bit; ``ModelError`` names one
    that it hasn't.
    """
    tensors, facts = read_adapters(folder)
    if facts != adapters.facts:
        raise ModelError(f"{folder} has {facts}, the checkpoint {adapters.facts}")
    for name in sorted(tensors.keys() | adapters.tensors.keys()):
        if (
            name not in tensors
            or name not in adapters.tensors
            or not torch.equal(tensors[name], adapters.tensors[name])
        ):
            raise ModelError(f"{folder}: {name} is not the checkpoint's")
    return len(tensors)


def merge(adapters: Adapters, source: Path, out: Path, *, dtype: torch.dtype | None = None) -> Path:
    """Write the Hugging Face directory of ``source`` with the adapters merged into it. Returns
    ``out``.

    dtype: to which the base is cast first; None: as it is. Raises ``ModelError`` for an adapter of
    no tensor of it.
    """
    check_output(out)
    companions(source)
    family, shape = family_of(read_config(source))
    with CheckpointReader(source) as reader:
        check_checkpoint(reader, family, shape)
        names = sorted(reader.names)
        carried = carried_names(reader.names, shape)
        targets = {name.rpartition(".lora_")[0] + ".weight" for name in adapters.tensors}
        if missing := sorted(targets - set(names)):
            raise ModelError(
                f"{source} has no {missing[0]}, which has an adapter ({len(missing)} missing)"
            )

        def stream() -> Iterator[tuple[str, Tensor]]:
            for name in names:
                value = reader.read(name)
                value = value if name in carried or dtype is None else value.to(dtype)
                yield name, _merged(name, value, adapters) if name in targets else value

        return write_checkpoint(out, stream(), source=source)


def _merged(name: str, weight: Tensor, adapters: Adapters) -> Tensor:
    names = [f"{name.removesuffix('weight')}lora_{which}.weight" for which in "AB"]
    if missing := [each for each in names if each not in adapters.tensors]:
        raise ModelError(f"{missing[0]} is not among the adapters; save them again")
    a, b = (adapters.tensors[each] for each in names)
    if (b.shape[0], a.shape[1]) != tuple(weight.shape):
        raise ModelError(f"{name} is {tuple(weight.shape)}, its adapter {(b.shape[0], a.shape[1])}")
    return add_product(weight, a, b, adapters.facts.scale)
