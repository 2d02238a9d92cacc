"""A Hugging Face checkpoint in a format of eight bits, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from megatron_gspo.errors import InputError
from megatron_gspo.models import family_of, hugging_face_names, read_config
from megatron_gspo.models.checkpoint_checks import check_checkpoint
from megatron_gspo.models.companions import companions
from megatron_gspo.models.families import carried_names
from megatron_gspo.models.hf_checkpoint import CheckpointReader, write_checkpoint
from megatron_gspo.models.quantization.module_list import ModuleListError
from megatron_gspo.models.quantization.plan import quantization_plan
from megatron_gspo.tools.convert.work_directory import check_output


def quantize_checkpoint(
    source: Path, out: Path, name: str, modules: Sequence[str], exclude: Sequence[str]
) -> Path:
    """Write ``source`` to ``out`` with the weights of these modules in format ``name``
    (`models/quantization`) and the others unchanged; its config.json has the
    ``quantization_config``. Returns ``out``.

    Memory: one shard. Raises ``InputError`` for an existing ``out`` and for lists that do not go
    with the model, ``ModelError`` for a checkpoint that is not this model's, ``DiskError``.
    """
    check_output(out)
    companions(source)
    family, shape = family_of(read_config(source))
    try:
        plan = quantization_plan(name, modules, exclude, family, shape)
    except ModuleListError as error:
        raise InputError(f"--{error.key} {error.value}: {error.problem}; {error.fix}") from None
    with CheckpointReader(source) as reader:
        check_checkpoint(reader, family, shape)
        own = [each for each in hugging_face_names(family, shape) if each in reader.names]
        carried = sorted(carried_names(reader.names, shape))
        kept = [each.removesuffix(".weight") for each in carried if each.endswith(".weight")]
        plan = replace(plan, kept=(*plan.kept, *kept))

        def tensors() -> Iterator[tuple[str, Tensor]]:
            yield from ((each, reader.read(each)) for each in (*own, *carried))

        return write_checkpoint(
            out, plan.quantize(tensors()), source=source, quantization=plan.config
        )
