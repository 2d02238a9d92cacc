"""The trained model as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from megatron_gspo.errors import DiskError
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.models.families import carried_names
from megatron_gspo.models.hf_checkpoint import (
    CheckpointReader,
    begin_checkpoint,
    publish_checkpoint,
    write_part,
)
from megatron_gspo.models.peft_files import AdapterFacts, can_fuse, write_adapters
from megatron_gspo.parallel.rank_zero import raise_on_every_rank, run_on_rank_zero


def export(policy: Policy, folder: Path) -> Path:
    """Write the model to ``folder``: each source writes its own tensors at the same time, rank 0
    publishes them.

    A collective of all ranks. Raises ``DiskError`` on every rank where one cannot write.
    """
    run_on_rank_zero(lambda: begin_checkpoint(folder))
    failure = ""
    for source in policy.sources:
        stream = policy.weights(source)
        if source.rank == dist.get_rank():
            try:
                write_part(folder, stream, part=source.number)
            except DiskError as error:
                failure = str(error)
        for _ in stream:  # other ranks take part in it
            pass
    raise_on_every_rank(failure, DiskError)
    return run_on_rank_zero(lambda: _publish(policy, folder), returns=Path)


def export_adapters(policy: Policy, folder: Path) -> Path:
    """Write the policy's adapters to ``folder`` in PEFT's format, for Transformers where all
    projections of the experts have adapters of their own, else for servers.

    A collective of all ranks: rank 0 collects them in host memory. Raises ``DiskError`` on every
    rank where it cannot write.
    """
    lora = policy.trained_lora
    assert lora is not None
    is_first = dist.get_rank() == 0
    tensors = {name: tensor.cpu().clone() for name, tensor in policy.adapters() if is_first}
    facts = AdapterFacts(lora.rank, lora.alpha, lora.rslora, policy.path, policy.base_checksum())
    run_on_rank_zero(
        lambda: write_adapters(folder, tensors, facts, fused=can_fuse(tensors)),
        error=DiskError,
        what=f"{folder} is not written",
    )
    return folder


def _publish(policy: Policy, folder: Path) -> Path:
    """Complete the checkpoint, with those tensors of the model's directory that are not trained
    as its last part.
    """
    parts = len(policy.sources)
    if policy.shape.carried:
        with CheckpointReader(policy.path) as reader:
            names = sorted(carried_names(reader.names, policy.shape))
            write_part(folder, ((name, reader.read(name)) for name in names), part=parts)
        parts += 1
    return publish_checkpoint(folder, source=policy.path, parts=parts)
