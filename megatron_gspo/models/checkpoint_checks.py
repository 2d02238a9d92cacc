"""Whether a Hugging Face checkpoint is the model of its config.json, whole and as Transformers
would load it.

Only the headers of its files are read, and of tied embeddings both tensors.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from megatron_gspo.models.config_defaults import HFConfig, shown
from megatron_gspo.models.families import check_names
from megatron_gspo.models.family import Family
from megatron_gspo.models.hf_checkpoint import CheckpointReader
from megatron_gspo.models.model_shape import ModelError, ModelShape, read_config
from megatron_gspo.models.packed_int4 import group_size
from megatron_gspo.models.rule_tables import VALUE_HEAD
from megatron_gspo.models.stacked_experts import tensor_of
from megatron_gspo.models.stored_formats import quantization_settings
from megatron_gspo.models.tensor_sizes import tensor_sizes

_READABLE = ("fp8", "mxfp4")  # as bfloat16, `CheckpointReader`
# Ends of names of tensors that only quantised checkpoints have, and what writes them.
_QUANTIZED_NAMES = (
    (".g_idx", "gptq"),
    (".qweight", "gptq or awq"),
    (".qzeros", "gptq or awq"),
    ("weight_packed", "compressed-tensors"),
    ("_packed", "compressed-tensors"),
    (".weight_scale_2", "modelopt"),
    (".absmax", "bitsandbytes"),
    (".SCB", "bitsandbytes"),
)
_PART_BYTES = 64 << 20  # of the embedding and of the output weight, compared at a time


def check_checkpoint(reader: CheckpointReader, family: Family, shape: ModelShape) -> None:
    """Raise ``ModelError`` for a checkpoint that is quantised, incomplete, damaged or not this
    model's, naming the file or tensor; and for one that Transformers would load otherwise."""
    config = read_config(reader.path)
    _check_sources(reader.path, config)
    check_quantization(config, reader.stored_names)
    check_names(reader.names, family, shape)
    reader.check()
    _check_sizes(reader, family, shape)
    if shape.tied_embeddings and not shape.value_head:
        _check_tied(reader, family, shape)


def _check_sources(folder: Path, config: HFConfig) -> None:
    """Files other than the usual ones that Transformers takes weights from."""
    explicit = config.get("transformers_weights")
    if explicit is not None:
        problem = f"transformers_weights={shown(explicit)} in config.json names other weights"
        raise ModelError(f"{problem}; remove it, and store them as model.safetensors")
    if (folder / "adapter_config.json").is_file():
        problem = (
            f"{folder}: has adapter_config.json, whose adapters Transformers would add to the"
            " weights"
        )
        raise ModelError(
            f"{problem}; megatron-gspo convert merge adds them; or put them in a directory of"
            " their own"
        )


def check_quantization(config: HFConfig, names: Collection[str]) -> None:
    """Raise ``ModelError`` for weights in a format that is not read, by the config or by the
    names of the tensors.
    """
    settings = quantization_settings(config)
    if not isinstance(settings, dict):
        raise ModelError(
            f"quantization_config={shown(settings)} in config.json is no object; download it again"
        )
    method = settings.get("quant_method", "compressed-tensors" if settings else None)
    is_int4 = method == "compressed-tensors" and group_size(settings) is not None
    by_name = next(
        (
            writer
            for end, writer in _QUANTIZED_NAMES
            if not (is_int4 and writer == method) and any(name.endswith(end) for name in names)
        ),
        None,
    )
    if by_name is None and (is_int4 or method in (None, *_READABLE)):
        return
    how = by_name
    if method not in (None, *_READABLE):
        how = shown(method).strip("'")
    problem = f"its weights are quantised by {how}"
    if settings.get("format"):
        problem += f" ({shown(settings['format'])})"
    elif "bits" in settings:
        problem += f" ({shown(str(settings['bits']) + ' bits')})"
    raise ModelError(
        f"{problem}; give the model in bfloat16, block FP8, MXFP4 or INT4 in groups,"
        " or dequantise it first"
    )


def _check_sizes(reader: CheckpointReader, family: Family, shape: ModelShape) -> None:
    for name, wanted in tensor_sizes(family, shape):
        whole, expert = tensor_of(name)
        if name in VALUE_HEAD.hugging_face and name not in reader.stored_names:
            continue
        if expert is None:
            _compare(name, reader.shape(name), wanted)
        elif expert == 0:  # the others are slices of the same tensor
            count = reader.shape(whole)[0]
            if count != shape.num_experts:
                raise ModelError(
                    f"{whole} has {count} experts in the checkpoint; config.json has"
                    f" {shape.num_experts}"
                )
            _compare(name, reader.shape(name), wanted)


def _compare(name: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if stored != wanted:
        raise ModelError(f"{name} is {stored} in the checkpoint; config.json makes it {wanted}")


def _check_tied(reader: CheckpointReader, family: Family, shape: ModelShape) -> None:
    """An output weight beside tied embeddings is the embedding. Transformers 5 would use another
    one all the same, and servers would not."""
    head = family.output_weight
    if head not in reader.names:
        return
    embedding = next(rule for rule in family.outer if rule.is_vocabulary).names()[0]
    rows, hidden = reader.shape(embedding)
    is_same = reader.shape(head) == (rows, hidden)
    step = max(_PART_BYTES // (4 * hidden), 1)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        is_same = is_same and torch.equal(
            reader.read(head, 0, start, stop), reader.read(embedding, 0, start, stop)
        )
    if not is_same:
        problem = f"tie_word_embeddings=true in config.json, and {head} is not {embedding}"
        fix = f"set tie_word_embeddings to false to train {head}, or remove {head} from the files"
        raise ModelError(f"{problem}: Transformers 5 would not tie them, and servers would; {fix}")
