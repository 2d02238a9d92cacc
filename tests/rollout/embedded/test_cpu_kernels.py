"""The CPU operators against the library's own."""

from __future__ import annotations

import pytest
import torch

from megatron_gspo.rollout.embedded.cpu_kernels import decode_attention


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_of_one_query(kv_heads, masked):
    torch.manual_seed(0)
    query = torch.randn(3, 4, 1, 8)
    key, value = torch.randn(2, 3, kv_heads, 6, 8).unbind(0)
    mask = None
    if masked:
        mask = torch.rand(3, 1, 1, 6) < 0.6
        mask[..., -1] = True
    attended, _ = decode_attention(torch.nn.Module(), query, key, value, mask)
    repeat = 4 // kv_heads
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1), attn_mask=mask
    )
    torch.testing.assert_close(attended, expected.transpose(1, 2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("queries", [1, 5])
def test_attention_with_sinks(queries):
    """Against all scores with one more column."""
    g = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(3, heads, length, 8, generator=g)
        for heads, length in ((4, queries), (2, 6), (2, 6))
    )
    sinks = torch.tensor([-1.0, 0.0, 1.0, 3.0])
    mask = torch.ones(3, 1, queries, 6, dtype=torch.bool).tril(6 - queries)
    mask[1, ..., :2] = False  # left padding, or keys before a window
    mask[1, :, range(queries), range(6 - queries, 6)] = True
    attended, _ = decode_attention(
        torch.nn.Module(), query, key, value, mask, s_aux=sinks, scaling=0.5
    )
    scores = 0.5 * query @ key.repeat_interleave(2, 1).transpose(2, 3)
    column = sinks.view(1, 4, 1, 1).expand(3, 4, queries, 1)
    weights = torch.cat((scores.masked_fill(~mask, -torch.inf), column), -1).softmax(-1)[..., :-1]
    expected = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(attended, expected, rtol=1e-5, atol=1e-6)
    if queries > 1:
        plain, _ = decode_attention(
            torch.nn.Module(), query, key, value, None, s_aux=sinks, scaling=0.5
        )
        torch.testing.assert_close(plain[0], expected[0], rtol=1e-5, atol=1e-6)
