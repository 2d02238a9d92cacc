"""Initial weights from a checkpoint of Megatron-LM, Megatron-Bridge or another run, in any
layout."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_gspo.errors import ModelError, first_line
from megatron_gspo.mcore.checkpoint.metadata_file import METADATA, read_metadata, stored_parts
from megatron_gspo.mcore.checkpoint.pieces import Piece, sharded_tensors
from megatron_gspo.mcore.checkpoint.read_pieces import read_pieces
from megatron_gspo.mcore.checkpoint.stored_keys import Place, is_weight, stored_place
from megatron_gspo.mcore.checkpoint.tensor_boxes import Box
from megatron_gspo.mcore.mixers import mixers_of
from megatron_gspo.models import ModelShape
from megatron_gspo.models.megatron_folders import iteration_folder
from megatron_gspo.parallel.rank_zero import raise_on_every_rank

_OUTPUT = "output_layer.weight"


def load_megatron_weights(chunks: Sequence[GPTModel], path: str, shape: ModelShape) -> None:
    """Fill this rank's (unwrapped) chunks from the distributed checkpoint at ``path``, reading only
    what this rank holds. A value head stays as it is. A collective of all ranks.

    Nothing is unpickled but the metadata of torch.distributed.checkpoint. Raises ``ModelError`` on
    every rank, naming the tensor, where one is missing, of other sizes, not finite or of no use.
    """
    failure = ""
    try:
        with torch.no_grad():
            left = _load(chunks, iteration_folder(path), shape)
    except (OSError, ValueError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        failure = f"model.megatron_path={path}: {first_line(error)}"
    raise_on_every_rank(failure, ModelError)
    left_by_all = _common(left)
    if left_by_all:
        raise ModelError(
            f"model.megatron_path={path}: has {min(left_by_all)}, which the model of config.json does not"
            f" use ({len(left_by_all)} extra)"
        )


def check_layers_are_megatrons(shape: ModelShape) -> None:
    """Raise ``ModelError`` for layers that Megatron-Core has not, or stores otherwise."""
    if not all(mixer.in_megatron for mixer in mixers_of(shape)):
        kinds = ", ".join(sorted(set(shape.mixers)))
        raise ModelError(
            f"the layers of {shape.model_type} ({kinds}) are not stored as Megatron-Core's; give"
            " the weights as safetensors in model.path"
        )


def _load(chunks: Sequence[GPTModel], folder: Path, shape: ModelShape) -> set[str]:
    """Keys of the checkpoint's weights that this rank has no use for."""
    check_layers_are_megatrons(shape)
    parts = stored_parts(read_metadata(folder / METADATA))
    sizes = {key: of_key[0].whole for key, of_key in parts.items() if of_key and of_key[0].whole}
    pieces = [piece for chunk in chunks for piece in _pieces(chunk, shape, sizes)]
    read_pieces(folder, pieces, stored=parts)
    for piece in pieces:
        if not bool(torch.isfinite(piece.values).all()):
            raise ValueError(f"{piece.key} holds NaN or infinity; use an earlier checkpoint")
    used = {piece.key for piece in pieces} | ({_OUTPUT} if shape.value_head else set())
    return {key for key in sizes.keys() - used if is_weight(key)}


def _pieces(
    chunk: GPTModel, shape: ModelShape, sizes: dict[str, tuple[int, ...]]
) -> Iterator[Piece]:
    for _, sharded in sharded_tensors(chunk):
        if shape.value_head and sharded.key == _OUTPUT:
            continue
        offsets = tuple(sharded.global_offset)
        box = Box(offsets, (1,) * sharded.prepend_axis_num + tuple(sharded.local_shape))
        place = Place(sharded.key, tuple(sharded.global_shape), box)
        place = stored_place(place, sizes, shape.num_layers)
        if sharded.allow_shape_mismatch and sizes.get(place.key, place.whole)[0] < shape.vocab_size:
            raise ValueError(
                f"{place.key} is {list(sizes[place.key])} there, and the vocabulary has"
                f" {shape.vocab_size} tokens"
            )
        values = sharded.data.detach().view(-1)
        yield Piece(place.key, place.whole, place.box, values, sharded.allow_shape_mismatch)


def _common(keys: set[str]) -> set[str]:
    """The keys that all ranks have."""
    of_ranks: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(of_ranks, keys)  # pickled, which is safe among a run's own ranks
    return set.intersection(*of_ranks)
