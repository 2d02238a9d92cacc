"""Responses are kept, and continued after a kill at any byte."""

from __future__ import annotations

import pytest

from megatron_gspo.errors import InputError
from megatron_gspo.tools.evaluate.response_file import ResponseFile
from tests.support.samples import make_sample

SETTINGS = {"seed": 1, "sampling": {"temperature": 1.0}}


def group(index, *rewards):
    samples = [make_sample(3, 2, prompt_index=index, sample_index=i) for i in range(len(rewards))]
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward
        sample.text = f"säge {index}"
    return samples


def test_a_file_that_is_cut_anywhere_is_continued(tmp_path):
    path = tmp_path / "task.jsonl"
    with ResponseFile(path, SETTINGS, 2) as kept:
        kept.write([group(0, 1.0, 0.0)])
        first = path.stat().st_size
        kept.write([group(1, 0.0, 0.0), group(2, 1.0, 1.0)])
    whole = path.read_bytes()
    header = whole.index(b"\n") + 1
    for cut in [*range(0, len(whole), 7), first, len(whole)]:
        path.write_bytes(whole[:cut])
        with ResponseFile(path, SETTINGS, 2) as again:
            done = list(again.records)
            assert done == [
                index
                for index, end in ((0, first), (1, _end(whole, 5)), (2, len(whole)))
                if cut >= end
            ]
            again.write(
                [
                    group(*each)
                    for each in ((0, 1.0, 0.0), (1, 0.0, 0.0), (2, 1.0, 1.0))
                    if each[0] not in done
                ]
            )
        assert path.read_bytes() == whole, cut
    assert header < first


def _end(content: bytes, lines: int) -> int:
    return len(b"".join(content.splitlines(keepends=True)[:lines]))


@pytest.mark.parametrize("other", [{"seed": 2}, {"sampling": {"temperature": 0.6}}, {"more": 1}])
def test_responses_of_other_settings_are_refused(tmp_path, other):
    path = tmp_path / "task.jsonl"
    ResponseFile(path, SETTINGS, 2).close()
    before = path.read_bytes()
    with pytest.raises(
        InputError, match=f"its responses are of {next(iter(other))} .* give another --output"
    ):
        ResponseFile(path, SETTINGS | other, 2)
    assert path.read_bytes() == before
