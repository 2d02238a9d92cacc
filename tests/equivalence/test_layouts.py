"""Every valid layout against Transformers in float64: log-probs, loss, metrics, gradients, and
three optimizer steps.

One launch a layout; every rank compares what it holds. Run one of them with, for example,
``pytest "tests/equivalence/test_layouts.py::test_moe[tp2-pp1-cp2-dp1-ep2-etp1]"``.
"""

from __future__ import annotations

from itertools import cycle, product

import pytest

from tests.equivalence.cases import OTHERS, Case, case_of
from tests.equivalence.layouts import DENSE, FAMILIES, LANGUAGE_MODELS, LORA, MOE, Arrangement
from tests.equivalence.measure import Models, case_for, launch
from tests.equivalence.tolerances import OF_EXPERTS, OF_LORA, TOLERANCES
from tests.equivalence.truth import ModelFiles

SINGLE = Arrangement()
TP2 = Arrangement(tensor=2, sequence_parallel=True)
CUTS = ("all in one", "threes")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("models"))


def check(model: ModelFiles, case: Case) -> None:
    ranks = launch(model, case)
    wrong = [
        f"rank {rank}: {kind} is off by {error:.1e} ({where})"
        for rank, errors in enumerate(ranks)
        for kind, (error, where) in errors.worst.items()
        if not error < (TOLERANCES | OF_LORA)[kind]
    ]
    assert not wrong, "\n".join(wrong)
    measured = {kind for errors in ranks for kind in errors.worst}
    absent = set() if case.distributed_optimizers else {"step metric", "update"}
    absent |= set() if case.replays else set(OF_EXPERTS)
    assert measured == set(TOLERANCES) - absent | set(OF_LORA if case.lora else ())


@pytest.mark.parametrize("arrangement", MOE, ids=lambda a: a.name)
def test_moe(models, arrangement):
    check(models("moe"), case_of(arrangement))


@pytest.mark.parametrize("arrangement", DENSE, ids=lambda a: a.name)
def test_dense(models, arrangement):
    check(models("dense"), case_of(arrangement))


@pytest.mark.parametrize(
    ("family", "arrangement"),
    [
        (family, arrangement)
        for family, chosen in (FAMILIES | LANGUAGE_MODELS).items()
        for arrangement in chosen
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_family(models, family, arrangement):
    """The other families; those of `LANGUAGE_MODELS` are a part of a model that reads images
    too.
    """
    check(models(family), case_for(family, arrangement))


@pytest.mark.parametrize(
    ("name", "arrangement"),
    [(name, arrangement) for name, chosen in LORA.items() for arrangement in chosen],
    ids=lambda value: getattr(value, "name", value),
)
def test_lora(models, name, arrangement):
    """Adapters against PEFT's, and those that experts share against a loop."""
    check(models(name), case_for(name, arrangement))


def special(arrangement: Arrangement, *runs: tuple[str, str], **model: object) -> Case:
    """A case of its own: the runs that are given, no optimizer steps."""
    return Case(arrangement, model, runs, runs[0][0], ())


@pytest.mark.parametrize("arrangement", [SINGLE, TP2, Arrangement(context=2)], ids=lambda a: a.name)
def test_other_objectives_and_cuts(models, arrangement):
    check(models("moe"), special(arrangement, *zip(OTHERS, cycle(CUTS), strict=False)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "arrangement",
    [
        Arrangement(pipeline=2),
        Arrangement(data=2, expert=2),
        Arrangement(pipeline=2, context=2, expert=2),
    ],
    ids=lambda a: a.name,
)
def test_other_objectives_in_every_cut(models, arrangement):
    check(models("moe"), special(arrangement, *product(OTHERS, CUTS)))


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", MOE[1::3], ids=lambda a: a.name)
def test_further_ids(models, arrangement):
    """Log-probs of several ids a token: those that could be drawn, the most likely ones of a
    teacher, and of the rollout engine. A third of the layouts, beside those of the other
    objectives."""
    check(
        models("moe"),
        special(
            arrangement,
            ("over a support", "packed"),
            ("distilled, centred", "packed"),
            ("distilled over all ids", "one by one"),
            ("centred, replayed", "one by one"),
        ),
    )


@pytest.mark.parametrize(
    "arrangement",
    [Arrangement(expert=2, data=2), Arrangement(tensor=2, sequence_parallel=True, expert=2)],
    ids=lambda a: a.name,
)
def test_allgather_dispatcher(models, arrangement):
    check(
        models("moe"),
        special(arrangement, ("gspo", "packed"), moe_token_dispatcher_type="allgather"),
    )


@pytest.mark.parametrize(
    "arrangement",
    [
        Arrangement(data=2, moe=False),
        Arrangement(tensor=2, sequence_parallel=True, data=2, expert=2),
        Arrangement(pipeline=2, data=2),
        Arrangement(pipeline=2, interleaved=True, data=2),
    ],
    ids=lambda a: a.name,
)
def test_overlapped_communication(models, arrangement):
    runs = (("gspo", "packed"), ("grpo", "one by one"))
    model = models("moe" if arrangement.moe else "dense")
    check(model, Case(arrangement, {}, runs, "gspo", (False, True), overlap=True))


@pytest.mark.parametrize(
    "arrangement",
    [
        Arrangement(moe=False),
        Arrangement(tensor=2, sequence_parallel=True, moe=False),
        Arrangement(tensor=2, pipeline=2, moe=False),
    ],
    ids=lambda a: a.name,
)
def test_tied_embeddings_and_padded_vocabulary(models, arrangement):
    check(models("tied"), case_of(arrangement))


@pytest.mark.parametrize(
    "arrangement",
    [SINGLE, Arrangement(pipeline=2), Arrangement(data=2, expert=2)],
    ids=lambda a: a.name,
)
def test_dense_layers_between_experts_and_unnormalised_top_k(models, arrangement):
    check(models("mixed"), case_of(arrangement))


@pytest.mark.parametrize(
    "arrangement",
    [
        Arrangement(tensor=2, sequence_parallel=True, expert=2),
        Arrangement(pipeline=2, data=2, expert=2),
        Arrangement(context=2),
    ],
    ids=lambda a: a.name,
)
def test_shared_experts_and_attention_biases(models, arrangement):
    """Another family: Qwen2-MoE."""
    check(models("shared"), case_of(arrangement))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_embedding_and_loss_count_as_layers(models, recompute):
    """The first chunk of the first stage and the last of the last have no layer, and every
    other chunk has one.
    """
    arrangement = Arrangement(pipeline=2, interleaved=True, outer=True)
    check(
        models("moe"),
        Case(arrangement, {"recompute": recompute}, (("gspo", "packed"),), "gspo", (False, True)),
    )
