"""Routes that can't be used: a line that names the sample. Missing routes: only where allowed,
and counted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_gspo.data.sample import Sample
from megatron_gspo.routing_replay.routes import as_routes
from tests.bad_input.test_rollouts import MyEngine, every, put, second
from tests.support.command_line import Case, Outcome, check, small_config, start, with_engine
from tests.support.samples import make_routes
from tests.support.tiny_models import save_tiny_model
from tests.support.training_runs import records

LAYERS, K, EXPERTS = 2, 2, 4  # of tests.support.training_runs.tiny_model


def routed(samples: list[Sample]) -> list[Sample]:
    """Routes that the model could have taken, for every sample."""
    return [
        replace(
            sample, routed_experts=make_routes(sample.length - 1, LAYERS, K, EXPERTS, seed=position)
        )
        for position, sample in enumerate(samples)
    ]


def then(breaks: Callable[[list[Sample]], Any]) -> Callable[[list[Sample]], Any]:
    return lambda samples: breaks(routed(samples))


def experts(change: Any) -> Callable[[list[Sample]], Any]:
    """The second sample with other routes."""
    return then(second(routed_experts=change))


def holes(*tokens: int) -> Callable[[list[Sample]], Any]:
    """The second sample without a route for these tokens."""

    def change(samples: list[Sample]) -> list[Sample]:
        unknown = np.zeros(samples[1].length - 1, bool)
        unknown[list(tokens)] = True
        return second(missing_routes=unknown)(samples)

    return then(change)


def narrowed(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[list[Sample]], Any]:
    """What an engine does with the array of its server: the second one is changed before."""

    def narrow(samples: list[Sample]) -> list[Sample]:
        arrays = [sample.routed_experts.astype(np.int64) for sample in routed(samples)]
        arrays[1] = change(arrays[1])
        narrowed_samples = []
        for sample, array in zip(samples, arrays, strict=True):
            where = f"sample {sample.prompt_index}/{sample.sample_index}"
            ids, unknown = as_routes(array, EXPERTS, where=where)
            narrowed_samples.append(replace(sample, routed_experts=ids, missing_routes=unknown))
        return narrowed_samples

    return narrow


def fault(name: str, phrase: str, breaks: Any, *shows: str) -> tuple[Case, Any]:
    return Case(name, phrase, shows=("/1: ", *shows), code=1), breaks


BROKEN = (
    fault(
        "routes with a row too few",
        "one for each token but the last, of this very tokenisation",
        experts(lambda ids: ids[:-1]),
        "routed_experts has",
        "rows for",
    ),
    fault(
        "expert twice",
        "routed_experts has an expert twice",
        experts(put((3, 1), [2, 2])),
        "token 3, MoE layer 1",
        "[2, 2]; give 2 different ones",
    ),
    fault(
        "routes of no sample",
        "routed_experts is missing; let the engine return the experts of every token",
        lambda samples: routed(samples[:1]) + samples[1:],
    ),
    fault(
        "token without a route",
        "set routing.missing_routes to live to leave them to the live router",
        holes(2, 5),
        "routed_experts has no route for 2 tokens (first: token 2)",
    ),
    fault(
        "hole of a server",
        "set routing.missing_routes to live to leave them to the live router",
        narrowed(put(4, -1)),
        "routed_experts has no route for 1 tokens (first: token 4)",
    ),
)
DENSE = Case(
    "replay with a dense model",
    "the model has no experts; set it to none",
    shows=('routing.replay = "r3"',),
)
CASES = (*(case for case, _ in BROKEN), DENSE)


def run(
    breaks: Any, model: str, tmp_path: Any, **routing: Any
) -> tuple[Outcome, dict[str, Any] | None]:
    """The outcome of a step with R3 and the step's record, where it was made."""
    config = small_config(model, tmp_path, routing={"replay": "r3", **routing})
    done = with_engine(config, MyEngine(breaks=breaks))
    return done, records(config["run_dir"])[-1] if done.code == 0 else None


@pytest.mark.parametrize(("case", "breaks"), BROKEN, ids=lambda value: getattr(value, "name", ""))
def test_routes_that_cannot_be_used_are_named(case, breaks, model, tmp_path):
    check(case, run(breaks, model, tmp_path)[0])


@pytest.mark.parametrize(
    ("breaks", "count"),
    [
        (holes(2, 5), 2),
        (narrowed(put(4, -1)), 1),
        (narrowed(put(slice(None), -1)), 9),  # a prompt of 5 tokens, a response of 5
    ],
    ids=["two tokens", "one token of a server", "a whole sample"],
)
def test_missing_routes_use_the_live_router_only_where_asked_and_are_counted(
    breaks, count, model, tmp_path
):
    done, row = run(breaks, model, tmp_path, missing_routes="live")
    assert done.code == 0, done.text
    assert row["routing/missing_routes"] == count
    assert row["updates"] == 1
    assert np.isfinite(row["loss"])


def test_other_faults_are_errors_with_missing_routes_live(model, tmp_path):
    wrong = Case("expert that the model hasn't", "the model has experts 0 to", code=1)
    check(wrong, run(experts(put((3, 1, 0), EXPERTS)), model, tmp_path, missing_routes="live")[0])
    missing = Case(
        "no routes",
        "routed_experts is missing; let the engine return the experts of every token",
        code=1,
    )
    check(missing, run(every(text="x"), model, tmp_path, missing_routes="live", storage="host")[0])


def test_replay_with_a_dense_model(model, tmp_path):
    dense = tmp_path / "dense"
    shutil.copytree(model, dense)
    vocabulary = json.loads((dense / "config.json").read_text())["vocab_size"]
    save_tiny_model(dense, "dense", vocab_size=vocabulary)
    config = small_config(str(dense), tmp_path, routing={"replay": "r3"})
    check(DENSE, start(config, tmp_path))
