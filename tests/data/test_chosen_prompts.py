"""Prompts by reference."""

from megatron_gspo.data.chosen_prompts import ChosenPrompts
from tests.support.samples import ReadItems, make_prompt


def test_prompts_are_read_when_they_are_accessed():
    data = ReadItems([make_prompt(i) for i in range(5)])
    chosen = ChosenPrompts.by_index(data, [3, 1, 4])
    last_two = chosen[1:]
    assert (len(chosen), chosen.indices, last_two.indices, data.read) == (3, [3, 1, 4], [1, 4], [])
    assert ChosenPrompts.of(chosen) is chosen
    assert ChosenPrompts(last_two.refs).indices == [1, 4]
    assert not data.read
    assert last_two[1] is list.__getitem__(data, 4) and data.read == [4]
    assert [prompt.index for prompt in chosen] == [3, 1, 4] and data.read == [4, 3, 1, 4]


def test_prompts_in_memory_keep_their_indices():
    prompts = [make_prompt(i) for i in (7, 2)]
    chosen = ChosenPrompts.of(prompts)
    assert chosen.indices == [7, 2] and list(chosen) == prompts and list(chosen[:1]) == prompts[:1]
