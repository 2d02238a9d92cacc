"""Padding of prompts, and where a response ends."""

import numpy as np
import torch

from megatron_gspo.rollout.embedded.decode import _collect, left_pad


def test_prompts_are_padded_on_the_left():
    ids, mask = left_pad([np.array([5, 6, 7]), np.array([8])])
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_a_response_ends_with_its_first_end_token():
    tokens = torch.tensor([[4, 1, 9], [4, 5, 6], [2, 1, 1]])
    found = _collect(tokens, torch.zeros(3, 3), torch.tensor([1, 2]))
    assert found.lengths.tolist() == [2, 3, 1]
    assert found.stopped.tolist() == [True, False, True]
    assert found.routes is None
