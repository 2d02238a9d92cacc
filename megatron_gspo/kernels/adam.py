"""A step of Adam with decoupled weight decay that clips gradients and writes bfloat16 weights.

For gradient g, main weight w and moments m and v of an element, after t steps:

    g' = clip g
    m' = m + (1 - beta1) (g' - m)        v' = beta2 v + (1 - beta2) g' g'
    w' = (1 - lr weight_decay) w - lr / (1 - beta1^t) m' / (sqrt(v' / (1 - beta2^t)) + eps)

In plain torch: ``torch.optim.AdamW`` between the clipping of gradients, which reads and writes
them, and the copies to the weights, which read w' again. Here an element is read once, 16 bytes,
and written once, 14 bytes. The operations and their order are those of torch's loop over tensors.

A launch has all tensors of a parameter group, wherever they are: a table holds their addresses.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024
"""Elements of a tensor, for each program."""
WIDE = 8
"""Elements that a thread has side by side, where all tensors begin with a multiple of `BYTES` and
have a multiple of so many elements."""
BYTES = 16
"""That a thread reads or writes at once there."""


@triton.jit(do_not_specialize=["count"])
def adam_kernel(
    table_pointer,
    tensor_pointer,
    count,
    clip,
    kept,
    gradient_share,
    beta2,
    square_share,
    correction,
    eps,
    step_size,
    WITH_WEIGHTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    entry = table_pointer + tl.load(tensor_pointer + program)
    size = tl.load(entry) * WIDTH
    first_program = tl.load(entry + count)
    columns = (program - first_program) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < size
    main_at = _elements(entry + 2 * count, columns, tl.float32, ALIGNMENT)
    grad_at = _elements(entry + 3 * count, columns, tl.float32, ALIGNMENT)
    mean_at = _elements(entry + 4 * count, columns, tl.float32, ALIGNMENT)
    square_at = _elements(entry + 5 * count, columns, tl.float32, ALIGNMENT)
    grad = tl.load(grad_at, mask=inside, other=0.0) * clip
    mean = tl.load(mean_at, mask=inside, other=0.0)
    mean += gradient_share * (grad - mean)
    square = tl.load(square_at, mask=inside, other=0.0) * beta2 + square_share * grad * grad
    # Stored at once, the moments' addresses need no registers below.
    tl.store(mean_at, mean, mask=inside)
    tl.store(square_at, square, mask=inside)
    scale = tl.div_rn(tl.sqrt_rn(square), correction) + eps
    main = tl.load(main_at, mask=inside, other=0.0) * kept
    main -= tl.div_rn(step_size * mean, scale)
    tl.store(main_at, main, mask=inside)
    if WITH_WEIGHTS:
        weight_at = _elements(entry + 6 * count, columns, tl.bfloat16, ALIGNMENT)
        tl.store(weight_at, main.to(tl.bfloat16), mask=inside)


@triton.jit
def _elements(entry, columns, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Pointers to a tensor's elements; the table has its address."""
    return tl.multiple_of(tl.load(entry).to(tl.pointer_type(dtype)) + columns, ALIGNMENT)


def adam_step(
    main: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    clip: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: float,
) -> None:
    """Update ``main``, the moments ``means`` and ``squares``, and ``weights`` by ``grads``.

    All are contiguous lists of one length, of tensors of the same sizes: float32, but ``weights``
    bfloat16, or empty where ``main`` are the weights. ``step``: of this step, from 1 on.
    """
    by_role = [main, grads, means, squares, *([weights] if weights else [])]
    for tensors in by_role:
        assert len(tensors) == len(main) and all(tensor.is_contiguous() for tensor in tensors)
    assert all(tensor.dtype == torch.float32 for tensor in (*main, *grads, *means, *squares))
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights)
    if not main:
        return
    sizes = torch.tensor([tensor.numel() for tensor in main])
    addresses = torch.tensor([[tensor.data_ptr() for tensor in role] for role in by_role])
    is_wide = (addresses % BYTES == 0).all(0) & (sizes % WIDE == 0)
    for chosen, width, alignment in ((is_wide, WIDE, BYTES), (~is_wide, 1, 1)):
        programs = -(-sizes[chosen] // COLUMNS)
        ends = programs.cumsum(0)
        count = len(programs)
        if not programs.any():
            continue
        heading = torch.stack((sizes[chosen] // width, ends - programs))
        table = torch.cat((heading, addresses[:, chosen]))
        tensor_of = torch.arange(count, dtype=torch.int32).repeat_interleave(programs)
        adam_kernel[(len(tensor_of),)](
            _on(main[0].device, table),
            _on(main[0].device, tensor_of),
            count,
            clip,
            1.0 - lr * weight_decay,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            (1.0 - beta2**step) ** 0.5,
            eps,
            lr / (1.0 - beta1**step),
            WITH_WEIGHTS=bool(weights),
            WIDTH=width,
            ALIGNMENT=alignment,
            COLUMNS=COLUMNS,
        )


def _on(device: torch.device, host: Tensor) -> Tensor:
    """A copy that the host doesn't wait for."""
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
