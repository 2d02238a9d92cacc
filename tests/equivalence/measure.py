"""One launch of a case and what its ranks found; the tests and the page of the docs share it."""

from __future__ import annotations

from pathlib import Path

from tests.equivalence.cases import ALL, BRANCHED, REPLAYED, SCENARIOS, Case, case_of, lora_case
from tests.equivalence.layouts import MEASURED, Arrangement
from tests.equivalence.lora import ADAPTERS, save_lora_truth
from tests.equivalence.run import Errors, run_case
from tests.equivalence.truth import save_truth
from tests.support.distributed import run_distributed
from tests.support.tiny_models import YARN, save_tiny_model

_WINDOWS = dict(
    use_sliding_window=True, sliding_window=4, max_window_layers=2, rope_parameters=YARN
)
MODELS = {
    "moe": dict(kind="moe"),
    "dense": dict(kind="dense"),
    "tied": dict(kind="dense", tie_word_embeddings=True, vocab_size=95),
    "mixed": dict(kind="moe", mlp_only_layers=[1], norm_topk_prob=False),
    "deepseek": dict(kind="deepseek", seed=13),
    "moonlight": dict(kind="moonlight", seed=6),
    "glm_lite": dict(kind="glm_lite", seed=5),
    "glm": dict(kind="glm", seed=7),
    "deepseek_v32": dict(kind="deepseek_v32", seed=4),
    "glm_dsa": dict(kind="glm_dsa", seed=1),
    "minimax": dict(kind="minimax", seed=21),
    "gpt_oss": dict(kind="gpt_oss"),
    "next": dict(kind="next", seed=24, initializer_range=0.1),
    "qwen35_moe": dict(kind="qwen35_moe", seed=2, initializer_range=0.1),
    "qwen35": dict(
        kind="qwen35", seed=40, initializer_range=0.1, tie_word_embeddings=True, vocab_size=95
    ),
    "windows": dict(kind="dense", **_WINDOWS),
    "moe_windows": dict(kind="moe", seed=39, **_WINDOWS),
    # A seed with which no expert's gradient is too small to compare.
    "shared": dict(kind="shared", seed=7),
}

DENSE_MODELS = {name for name, facts in MODELS.items() if facts["kind"] in ("dense", "qwen35")}


class Models:
    """Model directories with their reference files, each made on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, tuple[str, str]] = {}

    def __call__(self, name: str) -> tuple[str, str]:
        """A model of `MODELS`, or one with the truth about adapters of `ADAPTERS`."""
        if name in self._made:
            return self._made[name]
        if name in ADAPTERS:
            kind = ADAPTERS[name]
            path = save_tiny_model(self._folder / name, **MODELS[kind.model])
            self._made[name] = path, save_lora_truth(path, kind, self._folder / f"{name}.pt")
        else:
            path = save_tiny_model(self._folder / name, **MODELS[name])
            scenarios = (
                SCENARIOS | BRANCHED
                if name in DENSE_MODELS
                else ALL
                if name == "moe"
                else SCENARIOS | REPLAYED
            )
            self._made[name] = path, save_truth(path, self._folder / f"{name}.pt", tuple(scenarios))
        return self._made[name]


def case_for(name: str, arrangement: Arrangement) -> Case:
    """What the suite and the page run of a model, or of one with adapters, in an arrangement."""
    among = MEASURED[name]
    return (
        lora_case(arrangement, among, ADAPTERS[name].lora)
        if name in ADAPTERS
        else case_of(arrangement, among)
    )


def launch(model: tuple[str, str], case: Case) -> list[Errors]:
    """Run a case in as many processes as it has ranks; each rank's errors."""
    path, truth = model
    return run_distributed(run_case, case.arrangement.world_size, path, case, truth)


def worst_of(ranks: list[Errors]) -> Errors:
    """The largest error of each kind on any rank."""
    errors = Errors()
    for rank, of_rank in enumerate(ranks):
        errors.merge(of_rank, f"rank {rank}")
    return errors
