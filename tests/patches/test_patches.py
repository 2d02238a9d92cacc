"""How functions of upstream packages are replaced, and the exchange of interleaved stages."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import megatron_gspo.mcore.train_step  # noqa: F401  applies the patches; the fork server of the tests imports it once
from megatron_gspo.patches.mark import MARK, replace


def test_replace_works_once_and_keeps_the_original():
    owner = SimpleNamespace(double=lambda x: 2 * x)
    original = owner.double

    def plus_one(function: Callable[[int], int]) -> Callable[[int], int]:
        return lambda x: function(x) + 1

    replace(owner, "double", plus_one)
    first = owner.double
    replace(owner, "double", plus_one)
    assert owner.double is first and owner.double(3) == 7
    assert getattr(owner.double, MARK) is original


def test_a_missing_symbol_is_an_import_error_that_names_it():
    with pytest.raises(
        ImportError, match=r"cannot patch torch.distributed.no_such_function: .* version is unknown"
    ):
        replace(dist, "no_such_function", lambda original: original)


def test_two_interleaved_stages_exchange_unbatched(defects):
    assert defects["settings"] == (True, False)
    assert defects["errors"]["p2p guarded"][1] < 1e-5
    assert defects["errors"]["p2p unguarded"][1] > 0.1, (
        "upstream distinguishes the directions: delete the guard"
    )
