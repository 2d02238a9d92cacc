"""Ids and their log-probs in 6 bytes a pair in place of 8, without a loss.

A log-prob from -256 to -2^-120 has 2^30 values in float32, since its sign and the first bits of its
exponent are known. The ids of every vocabulary that is trained here have 18 bits.
"""

from __future__ import annotations

import numpy as np

_CODE_BITS = 30
_ID_BITS = 18
_FIRST = np.float32(-(2.0**-120)).view(np.uint32)  # code 0; the codes count the bits up from it
_ZERO = np.uint32((1 << _CODE_BITS) - 1)  # code of 0, in place of the last value before -256


def packed_top(ids: np.ndarray, log_probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """ids [n] int32 and log_probs [n] float32 as [n] uint32 and [n] uint16: the code of the
    log-prob with 2 bits of the id, and its other 16 bits.

    Where one of them has no code, both are [n] uint32, the bits of `ids` and `log_probs`. A zero
    loses its sign.
    """
    is_zero = log_probs == 0
    codes = _codes(log_probs, is_zero)
    if not _fit(ids, codes):
        return ids.view(np.uint32), log_probs.view(np.uint32)
    codes[is_zero] = _ZERO
    unsigned = ids.view(np.uint32)
    codes |= unsigned << _CODE_BITS
    return codes, (unsigned >> 2).astype(np.uint16)


def pair_bytes(ids: np.ndarray, log_probs: np.ndarray) -> int:
    """Bytes that each of these pairs takes in `packed_top`: 6, or 8 where one has no code."""
    return 6 if _fit(ids, _codes(log_probs, log_probs == 0)) else 8


def unpacked_top(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `packed_top`: ids [n] int32 and log_probs [n] float32."""
    if second.dtype == np.uint32:
        return first.view(np.int32), second.view(np.float32)
    bits = first & _ZERO
    is_zero = bits == _ZERO
    bits += _FIRST
    bits[is_zero] = 0
    ids = second.astype(np.uint32)
    ids <<= 2
    ids |= first >> _CODE_BITS
    return ids.view(np.int32), bits.view(np.float32)


def _codes(log_probs: np.ndarray, is_zero: np.ndarray) -> np.ndarray:
    """uint32, below _ZERO where there is one; 0 for zeros."""
    codes = log_probs.view(np.uint32) - _FIRST  # what is before _FIRST wraps to a large number
    codes[is_zero] = 0
    return codes


def _fit(ids: np.ndarray, codes: np.ndarray) -> bool:
    """Whether all ids and codes have their bits."""
    return bool(ids.max(initial=0) < 1 << _ID_BITS and codes.max(initial=0) < _ZERO)
