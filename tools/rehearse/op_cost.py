"""What an operation costs a GPU: its class, kernels, and bytes read and written.

By default an operation is one kernel that reads its arguments and writes its results, so that a
custom operation, such as one of Triton, needs no entry here. One whose name ``_CLASSES`` does not
have is of the class ``other``. Where a custom operation multiplies matrices, it declares its
floating-point operations with torch's ``register_flop_formula``.

Bytes are those of the tensors: of a dimension with stride 0 one element counts, and of a tensor
that is indexed the chosen rows. Views, and memory that is only allocated, cost nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gspo.tools.rehearse.known_values import tensors_in
from megatron_gspo.tools.rehearse.operation import Args, Kwargs, Operation, Result

PRODUCT_CLASSES = (
    "grouped product",
    "product",
    "product with float32 result",
    "float32 product",
    "attention",
)
"""Their time is that of floating-point operations; that of the others is the time of bytes."""

_CLASSES = {
    "product": "mm addmm bmm baddbmm mv addmv dot linalg_solve_triangular convolution"
    " convolution_backward",
    "grouped product": "grouped_mm",
    "norm": "rms_norm rms_norm_backward fused_rms_norm fused_rms_norm_backward native_layer_norm"
    " native_layer_norm_backward",
    "optimizer": "adam_step fused_adam fused_adamw fused_sgd",
    "gather, scatter": "index_select gather index take embedding embedding_dense_backward"
    " embedding_bag embedding_bag_forward_only embedding_bag_dense_backward index_add index_copy index_fill index_put"
    " index_put_impl scatter scatter_add scatter_reduce masked_select masked_scatter"
    " index_select_backward repeat_interleave add_embedding_gradient",
    "sort": "sort topk argsort nonzero nonzero_static bincount unique2 unique_dim unique_consecutive searchsorted"
    " histc",
    "reduction": "sum mean amax amin max min argmax argmin any all prod cumsum cumprod logsumexp"
    " softmax softmax_backward_data log_softmax log_softmax_backward_data linalg_vector_norm"
    " linalg_vecdot var std foreach_norm norm aminmax",
    "concatenation": "cat stack",
    "copy": "copy clone to_copy fill zero zeros ones full arange zeros_like ones_like full_like"
    " new_zeros new_ones new_full slice_backward select_backward constant_pad_nd roll flip repeat"
    " tril triu eye foreach_copy foreach_zero contiguous scalar_tensor",
}
"""Names of operations without underscores at their ends."""

_POINTWISE = ("masked_fill", "where", "native_dropout", "native_dropout_backward")
"""Element-wise operations that torch does not tag as such."""

_CLASS_OF = {name: op_class for op_class, names in _CLASSES.items() for name in names.split()}
_MIXED = "{}, mixed dtypes"
_STRIDED = "{}, strided"
"""Also where tensors are broadcast. Torch's kernels vectorise neither of the two. The tensors of a
list are not broadcast.
"""

_VECTORISED = ("elementwise", "copy")

CLASSES = (
    *PRODUCT_CLASSES,
    *(name for name in _CLASSES if name not in PRODUCT_CLASSES),
    "elementwise",
    *(slower.format(name) for name in _VECTORISED for slower in (_MIXED, _STRIDED)),
    "other",
    "host copy",
)

_FREE = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize",
        "set",
        "lift_fresh",
        "record_stream",
    }
)
_OVERWRITES = frozenset({"copy", "foreach_copy"})
"""They do not read the argument that they write."""

_FILLS = frozenset(
    "fill zero foreach_zero normal uniform random exponential bernoulli zeros_like ones_like"
    " full_like rand_like randn_like new_zeros new_ones new_full".split()
)
"""They read nothing."""

_KERNELS = {
    "slice_backward": 2,  # zeros, then a copy into them
    "select_backward": 2,
    "constant_pad_nd": 2,
    "rms_norm_backward": 2,  # of the input, of the weight
    "rotated_heads_backward": 2,  # and the sum of the weights' gradients
}


@dataclass(frozen=True)
class OpCost:
    """What one call costs. read, written: bytes."""

    op_class: str
    launches: int
    read: int
    written: int


def cost_of(func: Operation, args: Args, kwargs: Kwargs, out: Result) -> OpCost | None:
    """None for what starts no kernel."""
    name = short_name(func)
    if name in _FREE:
        return None
    read: list[Tensor] = []
    written: list[Tensor] = []
    for argument, value in zip(_arguments(func), _values(func, args, kwargs), strict=True):
        tensors = tensors_in((value,))
        if argument.is_written:
            written += tensors
        if not argument.is_out and not (argument.is_written and name in _OVERWRITES):
            read += tensors
    known = {_memory(tensor) for tensor in (*read, *written)}
    if name in _FILLS:
        read = []
    results = [tensor for tensor in tensors_in((out,)) if _memory(tensor) not in known]
    if not written and not results:
        return None
    sizes = _SIZES.get(name, _whole)(args, kwargs, _distinct(read), [*written, *results])
    return OpCost(_class_of(func, name, read, [*written, *results]), _KERNELS.get(name, 1), *sizes)


def short_name(func: Operation) -> str:
    """``aten::_foreach_mul_`` is ``foreach_mul``."""
    return func._schema.name.partition("::")[2].strip("_")


@dataclass(frozen=True)
class _Argument:
    is_written: bool
    is_out: bool


@functools.cache
def _arguments(func: Operation) -> tuple[_Argument, ...]:
    return tuple(
        _Argument(
            argument.alias_info is not None and argument.alias_info.is_write, bool(argument.is_out)
        )
        for argument in func._schema.arguments
    )


def _values(func: Operation, args: Args, kwargs: Kwargs) -> list[object]:
    """The value of each argument of the schema; None where it has its default."""
    names = [argument.name for argument in func._schema.arguments]
    return [*args, *(kwargs.get(name) for name in names[len(args) :])]


def _class_of(func: Operation, name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> str:
    tensors = [tensor for tensor in (*read, *written) if tensor.numel() > 1]
    if len({tensor.device.type for tensor in tensors}) > 1:
        return "host copy"
    if "attn" in name or "attention" in name:
        return "attention"
    default = "elementwise" if _is_elementwise(func, name) else "other"
    op_class = _CLASS_OF.get(name, default)
    if op_class == "product":
        if all(tensor.element_size() >= 4 for tensor in read):
            return "float32 product"
        if any(tensor.element_size() >= 4 for tensor in written):
            return "product with float32 result"
    if op_class in _VECTORISED and tensors:
        if len({tensor.dtype for tensor in tensors if tensor.dtype is not torch.bool}) > 1:
            return _MIXED.format(op_class)
        largest = 0 if name.startswith("foreach_") else max(tensor.numel() for tensor in tensors)
        if any(tensor.numel() < largest or not tensor.is_contiguous() for tensor in tensors):
            return _STRIDED.format(op_class)
    return op_class


def _is_elementwise(func: Operation, name: str) -> bool:
    return torch.Tag.pointwise in func.tags or name in _POINTWISE or name.startswith("foreach_")


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(
        tensor.element_size()
        * math.prod(
            size
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            if stride or not size
        )
        for tensor in tensors
    )


_Sizes = Callable[[Args, Kwargs, Sequence[Tensor], Sequence[Tensor]], tuple[int, int]]


def _whole(
    args: Args, kwargs: Kwargs, read: Sequence[Tensor], written: Sequence[Tensor]
) -> tuple[int, int]:
    return _bytes(read), _bytes(written)


def _gathered(
    args: Args, kwargs: Kwargs, read: Sequence[Tensor], written: Sequence[Tensor]
) -> tuple[int, int]:
    """Bytes of an indexed read: as much is read of the tensor as is written."""
    chosen = _bytes(written)
    return chosen + _bytes([tensor for tensor in read if tensor is not args[0]]), chosen


def _summed_rows(
    args: Args, kwargs: Kwargs, read: Sequence[Tensor], written: Sequence[Tensor]
) -> tuple[int, int]:
    """``embedding_bag``, and what sums rows as it does: a row of the weight for each index; beside
    the sums its results are only allocated."""
    weight, indices = args[:2]
    row = weight.element_size() * weight.shape[1]
    rest = _bytes([tensor for tensor in read if tensor is not weight])
    return indices.numel() * row + rest, _bytes(written[:1])


def _scattered(
    args: Args, kwargs: Kwargs, read: Sequence[Tensor], written: Sequence[Tensor]
) -> tuple[int, int]:
    """In place ``(target, dim, index, source or number)``: elements of the source, or as many as
    there are indices. A new tensor is a copy of the target before."""
    target, index = args[0], args[2]
    source = args[3] if len(args) > 3 and isinstance(args[3], Tensor) else None
    count = index.numel() if source is None else source.numel()
    changed = count * target.element_size()
    rest = _bytes([tensor for tensor in read if tensor is not target])
    if any(tensor is target for tensor in written):
        return rest, changed
    return rest + _bytes([target]), _bytes(written) + changed


def _added(
    args: Args, kwargs: Kwargs, read: Sequence[Tensor], written: Sequence[Tensor]
) -> tuple[int, int]:
    """A scatter that reads what it changes."""
    others, changed = _scattered(args, kwargs, read, written)
    is_new = not any(tensor is args[0] for tensor in written)
    count = args[3].numel() * args[0].element_size()
    return others + (0 if is_new else count), changed


def _added_rows(
    args: Args, kwargs: Kwargs, read: Sequence[Tensor], written: Sequence[Tensor]
) -> tuple[int, int]:
    """Rows that are added to rows of the first argument, each to another as far as there are."""
    total, rows = args[:2]
    changed = min(rows.numel(), total.numel()) * total.element_size()
    return changed + _bytes([tensor for tensor in read if tensor is not total]), changed


def _padded(
    args: Args, kwargs: Kwargs, read: Sequence[Tensor], written: Sequence[Tensor]
) -> tuple[int, int]:
    """All of the result is filled, then the argument copied into it."""
    return _bytes(read), _bytes(written) + _bytes(read)


def _adam(
    args: Args, kwargs: Kwargs, read: Sequence[Tensor], written: Sequence[Tensor]
) -> tuple[int, int]:
    """Gradients are written only where they are scaled."""
    gradients = () if kwargs.get("grad_scale") is not None else args[1]
    return _bytes(read), _bytes(written) - _bytes(gradients)


def _adam_with_copies(
    args: Args, kwargs: Kwargs, read: Sequence[Tensor], written: Sequence[Tensor]
) -> tuple[int, int]:
    """The copies of the main weights are only written."""
    return _bytes(read) - _bytes(args[4]), _bytes(written)


_SIZES: dict[str, _Sizes] = {
    "index_select": _gathered,
    "gather": _gathered,
    "index": _gathered,
    "embedding": _gathered,
    "copy_rows": _gathered,
    "embedding_bag": _summed_rows,
    "embedding_bag_forward_only": _summed_rows,
    "sum_rows": _summed_rows,
    "scatter": _scattered,
    "index_copy": _scattered,
    "add_embedding_gradient": _added_rows,
    "index_add": _added,
    "scatter_add": _added,
    "slice_backward": _padded,
    "select_backward": _padded,
    "constant_pad_nd": _padded,
    "adam_step": _adam_with_copies,
    "fused_adam": _adam,
    "fused_adamw": _adam,
}
