"""Routes: which experts each token of a sample went to, in every MoE layer. Plain arrays, stored
with the sample.

`Sample.routed_experts` is [L-1, layers, k]: row p holds the experts of input position p, for the
MoE layers only, in model order. An engine never feeds the last token, so it has no row.
`Sample.missing_routes` marks unknown rows. An engine gives the routes of all layers; a pipeline
stage keeps those of its own (`RouteShape.held`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from megatron_gspo.errors import RunError, describe_value

if TYPE_CHECKING:
    import torch

    from megatron_gspo.models.model_shape import ModelShape

MISSING = -1  # in an engine's signed array: the route of this token isn't known
MISSING_POLICIES = ("error", "live")


class RouteError(RunError):
    """Routes that don't fit their sample or the model; one line that names the sample, what was
    found and the fix.
    """


class RoutedSample(Protocol):
    """The part of `data.sample.Sample` that routes are checked against."""

    prompt_index: int
    sample_index: int
    routed_experts: np.ndarray | None
    missing_routes: np.ndarray | None

    @property
    def length(self) -> int: ...


@dataclass(frozen=True)
class RouteShape:
    """Sizes of a model's routes.

    Raises ValueError for impossible sizes (k above num_experts, more than 65536 experts).
    """

    layers: int
    """Number of MoE layers of the whole model."""

    k: int
    """Number of experts that a token uses in each."""

    num_experts: int
    """Number of experts of a layer."""

    moe_layers: tuple[bool, ...] = ()
    """For each layer of the model whether it has experts; empty: all have."""

    held: tuple[int, ...] | None = None
    """The MoE layers, ascending and numbered among those of the whole model, whose routes the
    samples carry; None: all."""

    def __post_init__(self) -> None:
        expert_id_dtype(self.num_experts)
        if self.layers < 1 or not 1 <= self.k <= self.num_experts:
            raise ValueError(f"{self}: give at least 1 layer and k from 1 to num_experts")
        if self.moe_layers and sum(self.moe_layers) != self.layers:
            raise ValueError(f"{self}: moe_layers has {sum(self.moe_layers)} layers with experts")
        if not set(self.held_layers) <= set(range(self.layers)) or sorted(
            set(self.held_layers)
        ) != [*self.held_layers]:
            raise ValueError(f"{self}: held must be ascending numbers from 0 to {self.layers - 1}")

    @classmethod
    def of_model(cls, model: ModelShape) -> RouteShape | None:
        """The shape of a model's routes; None for a model without experts."""
        if not model.is_moe:
            return None
        return cls(
            sum(model.moe_layers), model.experts_per_token, model.num_experts, model.moe_layers
        )

    @property
    def held_layers(self) -> tuple[int, ...]:
        """`held`, or all MoE layers."""
        return tuple(range(self.layers)) if self.held is None else self.held

    @property
    def dtype(self) -> np.dtype:
        """`expert_id_dtype(num_experts)`."""
        return expert_id_dtype(self.num_experts)

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as a torch type: `torch.uint8` or `torch.uint16`."""
        import torch  # reward workers import this module and must not load torch

        return torch.uint8 if self.dtype.itemsize == 1 else torch.uint16

    @property
    def bytes_per_token(self) -> int:
        """Storage of one token's routes in all layers: layers * k * itemsize."""
        return self.layers * self.k * self.dtype.itemsize


def expert_id_dtype(num_experts: int) -> np.dtype:
    """The smallest unsigned type that holds the ids 0 .. num_experts - 1: uint8 up to 256 experts,
    else uint16.

    Raises ValueError outside 1 to 65536.
    """
    if not 1 <= num_experts <= 2**16:
        raise ValueError(f"num_experts={num_experts}: use 1 to {2**16}")
    return np.dtype(np.uint8 if num_experts <= 2**8 else np.uint16)


def balanced_routes(positions: np.ndarray, shape: RouteShape) -> np.ndarray:
    """Routes that balance the experts' load, for positions without a row: [n, held layers, k] of
    `shape.dtype`, read-only.

    positions: [n] integers, within their sequence. Every layer gets (position * k + arange(k)) %
    num_experts.
    """
    first = np.asarray(positions, dtype=np.int64)[:, None] * shape.k
    ids = (first + np.arange(shape.k)) % shape.num_experts
    every_layer = (len(ids), len(shape.held_layers), shape.k)
    return np.broadcast_to(ids.astype(shape.dtype)[:, None], every_layer)


def as_routes(
    array: Any, num_experts: int, *, where: str = "routed_experts"
) -> tuple[np.ndarray, np.ndarray | None]:
    """An engine's expert ids as (`Sample.routed_experts`, `Sample.missing_routes`).

    Returns [rows, layers, k] of `expert_id_dtype(num_experts)`, not copied where it has that type,
    and the missing rows, [rows] bool, or None where there are none.

    Raises RouteError for ids outside of 0 to num_experts - 1.

    Args:
        array: [rows, layers, k] of any integer type. A token with MISSING (-1) in any layer has no
            known route; its ids become 0.
        where: begins the error; names the sample.
    """
    ids = np.asarray(array)
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise RouteError(
            f"{where}: expert ids are a {ids.ndim}-d {ids.dtype} array; give integers [rows,"
            " layers, k]"
        )
    missing = None
    if ids.dtype.kind == "i" and ids.size and ids.min() < 0:
        if ids.min() < MISSING:
            fault = f"the negative expert {ids.min()}"
            raise RouteError(
                f"{where}: routes have {fault}; ids start at 0, and -1 says that a route isn't"
                " known"
            )
        missing = (ids == MISSING).any((1, 2))
        ids = np.where(missing[:, None, None], 0, ids)
    if ids.size and ids.max() >= num_experts:
        fault = unknown_expert(int(ids.max()), num_experts)
        raise RouteError(f"{where}: routes have {fault}: give its own routes")
    return ids.astype(expert_id_dtype(num_experts), copy=False), missing


def route_fault(sample: RoutedSample) -> str:
    """Why routed_experts and missing_routes aren't what `Sample` documents; empty where they
    are, or are None.
    """
    experts = sample.routed_experts
    missing = sample.missing_routes
    if experts is None:
        if missing is None:
            return ""
        return "missing_routes is given without routed_experts; give both or neither"
    if not isinstance(experts, np.ndarray) or experts.ndim != 3:
        return (
            f"routed_experts is {describe_value(experts)}; it must be a [tokens - 1, layers, k]"
            " numpy array"
        )
    if experts.dtype.kind != "u":
        return (
            f"routed_experts is {describe_value(experts)}; make it unsigned with"
            " routing_replay.routes.as_routes"
        )
    rows = sample.length - 1
    if experts.shape[0] != rows:
        fix = f"give {rows}, one for each token but the last, of this very tokenisation"
        return f"routed_experts has {experts.shape[0]} rows for {sample.length} tokens; {fix}"
    if missing is None:
        return ""
    if not isinstance(missing, np.ndarray) or missing.dtype != np.bool_ or missing.shape != (rows,):
        value = f"{describe_value(missing)} of shape {list(np.shape(missing))}"
        return (
            f"missing_routes is {value}; it must be a [{rows}] bool numpy array, one for each row"
            " of routed_experts"
        )
    return ""


def check_routes(
    samples: Sequence[RoutedSample], shape: RouteShape, *, missing: str = "error"
) -> int:
    """Check that the samples' routes, of all layers, fit the model; returns how many tokens have no
    known route.

    missing: "error" refuses tokens without a route, "live" counts them (the live router routes
    them).

    Raises RouteError for a sample without routes, rows for another number of tokens, another number
    of layers or of experts per token, an id out of range, an expert twice in a row, and a missing
    row where that is refused. ValueError for another `missing`. About 1.6 ms for 2000 tokens of 48
    layers x 8 of 128 experts.
    """
    if missing not in MISSING_POLICIES:
        raise ValueError(f"missing={missing!r}; use one of {', '.join(MISSING_POLICIES)}")
    total = 0
    for sample in samples:
        fault = route_fault(sample) or _fault_in_model(sample, shape)
        count = 0
        if not fault and sample.missing_routes is not None:
            count = int(np.count_nonzero(sample.missing_routes))
        if count and missing == "error":
            assert sample.missing_routes is not None
            first = int(sample.missing_routes.argmax())
            fault = f"routed_experts has no route for {count} tokens (first: token {first}); "
            fault += "set routing.missing_routes to live to leave them to the live router"
        if fault:
            raise RouteError(f"sample {sample.prompt_index}/{sample.sample_index}: {fault}")
        total += count
    return total


def _fault_in_model(sample: RoutedSample, shape: RouteShape) -> str:
    """Why the routes of a sample (of a right shape and type) can't be this model's; empty where
    they can.
    """
    ids = sample.routed_experts
    if ids is None:
        return "routed_experts is missing; let the engine return the experts of every token"
    layers, k = ids.shape[1:]
    if (layers, k) != (shape.layers, shape.k):
        wanted = (
            f"this model's have {shape.layers} MoE layers x {shape.k}; give those of the model that"
            " is trained"
        )
        return f"routed_experts has {layers} layers x {k} experts a token; {wanted}"
    if not ids.size:
        return ""
    missing = sample.missing_routes
    if not _in_range(ids, shape) and not (missing is not None and _in_range(ids[~missing], shape)):
        wrong = ids >= shape.num_experts
        if missing is not None:
            wrong[missing] = False
        token, layer, rank = np.argwhere(wrong)[0]
        fault = unknown_expert(int(ids[token, layer, rank]), shape.num_experts)
        return f"token {token}, MoE layer {layer}: routed_experts has {fault}: give its own routes"
    repeated = _repeats(ids)
    if missing is not None:
        repeated[missing] = False
    if not repeated.any():
        return ""
    token, layer = np.argwhere(repeated)[0]
    row = ids[token, layer].tolist()
    return (
        f"token {token}, MoE layer {layer}: routed_experts has an expert twice: {row}; give {k}"
        " different ones"
    )


def _in_range(ids: np.ndarray, shape: RouteShape) -> bool:
    held_by_type = np.iinfo(ids.dtype).max < shape.num_experts
    return held_by_type or not ids.size or int(ids.max()) < shape.num_experts


def _repeats(ids: np.ndarray) -> np.ndarray:
    """[rows, layers] bool: whether the k experts [rows, layers, k] hold one twice."""
    rows, layers, k = ids.shape
    # Comparing whole columns is several times faster than sorting.
    columns = np.ascontiguousarray(ids.reshape(-1, k).T)
    repeated = np.zeros(rows * layers, dtype=bool)
    for gap in range(1, k):
        repeated |= (columns[gap:] == columns[:-gap]).any(0)
    return repeated.reshape(rows, layers)


def unknown_expert(expert: int, num_experts: int) -> str:
    """What a message calls an expert that the model does not have."""
    return f"the expert {expert}; the model has experts 0 to {num_experts - 1}"
