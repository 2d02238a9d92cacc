"""Routes that an engine gives: taken as they are, or refused by a line that names the sample."""

import numpy as np
import pytest
import torch

from megatron_gspo.routing_replay.routes import (
    RouteError,
    RouteShape,
    as_routes,
    balanced_routes,
    check_routes,
    expert_id_dtype,
)
from tests.support.samples import make_routes, make_sample

SHAPE = RouteShape(layers=2, k=3, num_experts=8)


def good(prompt=3, response=4, seed=0, shape=SHAPE, **fields):
    ids = make_routes(prompt + response - 1, shape.layers, shape.k, shape.num_experts, seed=seed)
    return make_sample(prompt, response, seed=seed, **({"routed_experts": ids} | fields))


def edited(place, value, **fields):
    """A good sample but for one id (or several)."""
    sample = good(seed=5, **fields)
    sample.routed_experts[place] = value
    return sample


@pytest.mark.parametrize(
    ("experts", "dtype"),
    [(1, np.uint8), (255, np.uint8), (256, np.uint8), (257, np.uint16), (2**16, np.uint16)],
)
def test_the_smallest_type_that_holds_the_ids(experts, dtype):
    assert expert_id_dtype(experts) == dtype
    shape = RouteShape(1, 1, experts)
    assert shape.dtype == dtype and torch.zeros(1, dtype=shape.torch_dtype).numpy().dtype == dtype
    last = np.array([[[experts - 1]]])
    ids, missing = as_routes(last, experts)
    assert ids.dtype == dtype and ids.tolist() == [[[experts - 1]]] and missing is None
    with pytest.raises(
        RouteError, match=f"the expert {experts}; the model has experts 0 to {experts - 1}"
    ):
        as_routes(last + 1, experts)
    assert check_routes([make_sample(1, 1, routed_experts=ids)], shape) == 0
    if experts < np.iinfo(dtype).max + 1:
        with pytest.raises(
            RouteError, match=f"the expert {experts}; the model has experts 0 to {experts - 1}"
        ):
            check_routes([make_sample(1, 1, routed_experts=(last + 1).astype(dtype))], shape)


@pytest.mark.parametrize("sizes", [(0, 1, 8), (1, 0, 8), (1, 9, 8), (1, 1, 0), (1, 1, 2**16 + 1)])
def test_sizes_that_no_model_has(sizes):
    with pytest.raises(ValueError, match="num_experts"):
        RouteShape(*sizes)


@pytest.mark.parametrize("held", [(2,), (-1,), (1, 0), (0, 0)])
def test_layers_that_a_model_does_not_have_or_in_another_order(held):
    with pytest.raises(ValueError, match="held must be ascending numbers from 0 to 1"):
        RouteShape(2, 1, 8, held=held)
    assert RouteShape(2, 1, 8).held_layers == (0, 1) == RouteShape(2, 1, 8, held=(0, 1)).held_layers


def test_a_spread_by_hand():
    ids = balanced_routes(np.array([0, 1, 3]), SHAPE)
    rows = [[0, 1, 2], [3, 4, 5], [1, 2, 3]]  # 9, 10, 11 modulo 8
    assert ids.tolist() == [[row, row] for row in rows] and ids.dtype == np.uint8
    assert balanced_routes(np.array([], np.int64), SHAPE).shape == (0, 2, 3)
    assert balanced_routes(np.array([2**40]), RouteShape(1, 2, 300)).tolist() == [
        [[2**41 % 300, 2**41 % 300 + 1]]
    ]


@pytest.mark.parametrize(
    "dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint64]
)
def test_arrays_of_engines_are_narrowed_and_missing_routes_kept_apart(dtype):
    wanted = make_routes(6, 2, 3, 8)
    ids, missing = as_routes(wanted.astype(dtype), 8)
    assert ids.dtype == np.uint8 and ids.tolist() == wanted.tolist() and missing is None
    if np.dtype(dtype).kind == "i":
        given = wanted.astype(dtype)
        given[2] = -1
        given[4, 1, 2] = -1
        ids, missing = as_routes(given, 8)
        assert missing.tolist() == [False, False, True, False, True, False]
        assert missing.dtype == bool
        assert ids.dtype == np.uint8 and ids[~missing].tolist() == wanted[~missing].tolist()
        assert ids[missing].tolist() == np.zeros((2, 2, 3), int).tolist()


@pytest.mark.parametrize(
    ("array", "experts", "message"),
    [
        (
            np.full((1, 1, 1), -2),
            8,
            "sample 3/1: routes have the negative expert -2; ids start at 0, and -1 says",
        ),
        (
            np.full((1, 1, 1), 8),
            8,
            "sample 3/1: routes have the expert 8; the model has experts 0 to 7",
        ),
        (np.full((1, 1, 1), 256 + 3), 8, "the expert 259;"),  # 3, if it wrapped around
        (np.full((1, 1, 1), 2**16 + 3), 300, "the expert 65539;"),
        (np.full((1, 1, 1), 255, np.uint8), 128, "the expert 255;"),
        (
            np.full((1, 1, 1), 1.0),
            8,
            "expert ids are a 3-d float64 array; give integers [rows, layers, k]",
        ),
        (np.full((1, 1, 1), True), 8, "expert ids are a 3-d bool array"),
        (np.zeros((4, 6), int), 8, "expert ids are a 2-d int64 array"),
        ([["a"]], 8, "expert ids are a 2-d <U1 array"),
    ],
)
def test_nothing_wraps_around(array, experts, message):
    with pytest.raises(RouteError) as error:
        as_routes(array, experts, where="sample 3/1")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_good_routes_and_the_count_of_missing_routes():
    complete = good()
    assert check_routes([complete, good(seed=1)], SHAPE) == 0
    some = good(seed=2, missing_routes=np.array([True, False, False, True, False, True]))
    assert check_routes([complete, some, some], SHAPE, missing="live") == 6
    assert check_routes([good(seed=3, missing_routes=np.zeros(6, bool))], SHAPE) == 0
    assert check_routes([good(1, 0)], SHAPE) == 0  # one token: no row
    assert check_routes([], SHAPE) == 0


def test_the_ids_of_a_missing_route_do_not_matter():
    is_missing = np.array([False, True, False, False, False, False])
    sample = edited(1, 0, missing_routes=is_missing)
    assert check_routes([sample], SHAPE, missing="live") == 1
    sample.routed_experts[1] = 255
    assert check_routes([sample], SHAPE, missing="live") == 1
    sample.routed_experts[2, 1] = [1, 2, 1]
    with pytest.raises(
        RouteError, match="token 2, MoE layer 1: routed_experts has an expert twice"
    ):
        check_routes([sample], SHAPE, missing="live")
    sample.routed_experts[2, 1] = [1, 2, 8]
    with pytest.raises(RouteError, match="token 2, MoE layer 1: routed_experts has the expert 8; "):
        check_routes([sample], SHAPE, missing="live")


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            good(routed_experts=None),
            "routed_experts is missing; let the engine return the experts of every token",
        ),
        (
            good(routed_experts=make_routes(6, 3, 3, 8)),
            "has 3 layers x 3 experts a token; this model's have 2 MoE",
        ),
        (
            good(routed_experts=make_routes(6, 2, 2, 8)),
            "has 2 layers x 2 experts a token; this model's have 2 MoE",
        ),
        (
            good(routed_experts=make_routes(5, 2, 3, 8)),
            "has 5 rows for 7 tokens; give 6, one for each token but",
        ),
        (
            good(routed_experts=make_routes(7, 2, 3, 8)),
            "has 7 rows for 7 tokens; give 6, one for each token but",
        ),
        (
            good(routed_experts=make_routes(6, 2, 3, 8).astype(int)),
            "is a 3-d int64 array; make it unsigned",
        ),
        (good(routed_experts=make_routes(6, 6, 1, 8)[:, :, 0]), "is a 2-d uint8 array; it must be"),
        (
            edited((4, 1, 2), 8),
            "token 4, MoE layer 1: routed_experts has the expert 8; the model has experts 0 to 7",
        ),
        (edited((0, 0, 0), 255), "token 0, MoE layer 0: routed_experts has the expert 255;"),
        (
            edited((3, 1), [6, 2, 6]),
            "token 3, MoE layer 1: routed_experts has an expert twice: [6, 2, 6]; give 3",
        ),
        (
            edited((5, 0), [6, 6, 1]),
            "token 5, MoE layer 0: routed_experts has an expert twice: [6, 6, 1]",
        ),
        (
            good(missing_routes=np.array([False, False, True, True, False, False])),
            (
                "routed_experts has no route for 2 tokens (first: token 2); set"
                " routing.missing_routes to live"
            ),
        ),
    ],
)
def test_a_fault_names_the_sample_what_was_found_and_the_fix(sample, message):
    sample.prompt_index = 31
    sample.sample_index = 4
    with pytest.raises(RouteError) as error:
        check_routes([good(), sample], SHAPE)
    assert str(error.value).startswith("sample 31/4: ") and message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_policy_for_missing_routes():
    with pytest.raises(ValueError, match="missing='ignore'; use one of error, live"):
        check_routes([good()], SHAPE, missing="ignore")


@pytest.mark.parametrize("k, experts", [(1, 4), (2, 9), (3, 64), (8, 300)])
def test_repeats_against_a_naive_loop(k, experts):
    shape = RouteShape(2, k, experts)
    rng = np.random.default_rng(k)
    outcomes = set()
    for _ in range(60):
        ids = rng.integers(0, experts, (4, 2, k)).astype(shape.dtype)
        twice = any(len(set(row)) < k for token in ids.tolist() for row in token)
        outcomes.add(twice)
        sample = make_sample(2, 3, routed_experts=ids)
        if twice:
            with pytest.raises(RouteError, match="an expert twice"):
                check_routes([sample], shape)
        else:
            assert check_routes([sample], shape) == 0
    assert outcomes == ({False} if k == 1 else {True, False})
