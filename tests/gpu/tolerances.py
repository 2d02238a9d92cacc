"""How far a result may be from the float64 reference, by the precision in which it was computed.

Rounding to p significant bits changes a number by at most u = 2^-p of itself. The errors of n
roundings are as good as independent, so that they add up like a random walk: the norm of a tensor's
error is at most about u sqrt(n) of the tensor's norm (Higham and Mary, "A new approach to
probabilistic rounding error analysis", SISC 41, 2019). Gating and attention multiply tensors that
are off already, whose errors add up: a factor of at most 2.

A sum of K products is one rounding in bfloat16, whose products are summed in float32, and K in
float32.
"""

from __future__ import annotations

import math

AMPLIFICATION = 2
BITS = {"bfloat16": 8, "tf32": 11, "float32": 24}
# Norms, products, rotation, softmax, gating, weighing, permutation and residual sums of a layer:
# tensors that are rounded between its input and its output, and how many of them are products.
ROUNDINGS = 20
PRODUCTS = 7
# The backward pass rounds as many again for the gradients of inputs and weights, from activations
# that are off already.
BACKWARD = 3


def unit_roundoff(dtype: str, device: str, implementation: str = "torch") -> float:
    """u of the layers.

    Transformer Engine multiplies float32 as TF32. On a GPU torch's fused attention splits a float32
    into three TF32 numbers, which keeps about 21 of its 24 bits.
    """
    if dtype == "float32" and implementation == "transformer_engine":
        return 2.0 ** -BITS["tf32"]
    if dtype == "float32" and device == "cuda":
        return 2.0**-21
    return 2.0 ** -BITS[dtype]


def tolerance(unit: float, roundings: float) -> float:
    """Relative error after so many roundings."""
    return AMPLIFICATION * unit * math.sqrt(roundings)


def of_layers(unit: float, dtype: str, *, layers: int, terms: int) -> float:
    """Relative error of the output of some layers; ``terms``: of the longest sums of products."""
    return tolerance(unit, layers * (ROUNDINGS + (PRODUCTS * terms if dtype == "float32" else 0)))


def of_gradients(unit: float, dtype: str, *, layers: int, terms: int) -> float:
    """Relative error of the gradients of inputs and weights of some layers."""
    return math.sqrt(BACKWARD) * of_layers(unit, dtype, layers=layers, terms=terms)
