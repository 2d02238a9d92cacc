"""The cache holds what a concatenation would, through growth and selections of rows."""

import torch

from megatron_gspo.rollout.embedded.kv_cache import BufferCache


def columns(rows, count, seed):
    return torch.randn(2, rows, 3, count, 4, generator=torch.Generator().manual_seed(seed)).unbind(0)


def test_columns_are_appended_beyond_the_capacity():
    cache, parts = BufferCache(["full_attention"] * 2, capacity=3), [columns(2, count, count) for count in (2, 1, 4)]
    for keys, values in parts:
        found = [cache.update(keys, values, layer) for layer in (0, 1)]
    for keys, values in found:
        assert torch.equal(keys, torch.cat([k for k, _ in parts], 2))
        assert torch.equal(values, torch.cat([v for _, v in parts], 2))
    assert cache.get_seq_length() == 7


def test_a_column_is_written_in_place_within_the_capacity():
    cache = BufferCache(["full_attention"], capacity=4)
    before, _ = cache.update(*columns(1, 2, 0), 0)
    after, _ = cache.update(*columns(1, 1, 1), 0)
    assert after.data_ptr() == before.data_ptr()


def test_rows_are_repeated_dropped_and_reordered():
    cache, (keys, values) = BufferCache(["full_attention"], capacity=2), columns(3, 2, 0)
    cache.update(keys, values, 0)
    rows = torch.tensor([2, 0, 0, 1])
    cache.select_rows(rows, capacity=5)
    more = columns(4, 1, 1)
    found_keys, found_values = cache.update(*more, 0)
    assert torch.equal(found_keys, torch.cat([keys[rows], more[0]], 2))
    assert torch.equal(found_values, torch.cat([values[rows], more[1]], 2))


def test_states_of_linear_attention_follow_their_rows():
    cache = BufferCache(["linear_attention", "full_attention"], capacity=2)
    states = torch.arange(6.0).view(3, 2, 1)
    cache.update_conv_state(states, 0)
    cache.update_recurrent_state(10 * states, 0)
    cache.update(*columns(3, 2, 0), 1)
    cache.select_rows(torch.tensor([2, 0]))
    assert torch.equal(cache.get_conv_state(0), states[[2, 0]])
    assert torch.equal(cache.get_recurrent_state(0), 10 * states[[2, 0]])
    assert cache.get_seq_length() == 2
