"""The formats by hand, against naive loops in float64, and byte for byte against Transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from megatron_gspo.models.quantization.formats import (
    FORMATS,
    dequantize_blocks,
    quantize_blocks,
    quantize_rows,
)

SIZES = ((128, 128), (256, 384), (576, 200), (1, 1), (130, 300), (64, 48))


def weight(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers of very different magnitudes, with a block of zeros where there are two
    blocks of columns.
    """
    generator = torch.Generator().manual_seed(rows * columns)
    values = torch.randn(rows, columns, generator=generator) * torch.exp(
        torch.randn(rows, columns, generator=generator)
    )
    values[:128, 128:256] = 0.0
    return values.to(dtype)


def of_transformers(tensor: Tensor, block: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    config = SimpleNamespace(weight_block_size=block, scale_fmt="float")
    converted = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert(
        {"x.weight": tensor}
    )
    return converted["x.weight"], converted["x.weight_scale_inv"]


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    )


def test_a_block_by_hand():
    """1.75 becomes 448; the scale is 1.75 / 448 = 2 ** -8, and -0.25 becomes -64."""
    values, scales = quantize_blocks(torch.tensor([[1.75, -0.25], [0.0, 0.0039]]))
    assert values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    assert scales.tolist() == [[2.0**-8]]
    # 0.0039 * 256 = 0.9984, next to 1.
    assert values.float().tolist() == [[448.0, -64.0], [0.0, 1.0]]


def test_rows_by_hand():
    values, scales = quantize_rows(torch.tensor([[127.0, -63.5], [0.0, 0.0], [-2.54, 0.03]]))
    assert values.dtype == torch.int8 and scales.shape == (3, 1)
    # Halves go to the even number; 0.03 / 0.02 = 1.5.
    assert values.tolist() == [[127, -64], [0, 0], [-127, 2]]
    assert scales.flatten().tolist() == pytest.approx([1.0, 1.0, 0.02])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_blocks_are_those_of_transformers(size, dtype):
    """Which takes whole blocks only: the others are padded with zeros before and cut after."""
    tensor = weight(*size, dtype)
    rows, columns = size
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128, dtype=dtype)
    padded[:rows, :columns] = tensor
    values, scales = of_transformers(padded, (128, 128))
    quantized = quantize_blocks(tensor)
    assert same_bytes(quantized[0], values[:rows, :columns].contiguous()) and same_bytes(
        quantized[1], scales
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_tensor_is_that_of_transformers(dtype):
    tensor = weight(130, 300, dtype)
    values, scale = of_transformers(tensor, None)
    quantized = FORMATS["fp8_tensor"].quantize(tensor)
    assert same_bytes(quantized[0], values) and same_bytes(quantized[1], scale.view(1))


@pytest.mark.parametrize(
    "size", [size for size in SIZES if all(n % 128 == 0 for n in size)], ids=str
)
def test_dequantised_blocks_are_those_of_transformers(size):
    values, scales = quantize_blocks(weight(*size))
    expected = Fp8Dequantize(SimpleNamespace(quantization_config=None))._dequantize_one(
        values, scales, torch.float32
    )
    assert torch.equal(dequantize_blocks(values, scales), expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_weight_itself_stays_as_it_is(name, dtype):
    """A stream has views of the parameters that are trained."""
    tensor = weight(256, 384, dtype)
    before = tensor.clone()
    FORMATS[name].quantize(tensor)
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_tiny_numbers_stay_finite(name):
    each = FORMATS[name]
    tensor = torch.zeros(3, 5)
    tensor[0, 0] = 1e-38
    restored = each.dequantize(*each.quantize(tensor))
    assert torch.equal(restored, torch.zeros(3, 5))


def test_the_blocks_of_a_slice_are_those_of_its_place():
    values, scales = quantize_blocks(weight(300, 260))
    whole = dequantize_blocks(values, scales)
    assert torch.equal(dequantize_blocks(values[100:210], scales, firsts=(100, 0)), whole[100:210])
    assert torch.equal(dequantize_blocks(values[:, 120:], scales, firsts=(0, 120)), whole[:, 120:])
