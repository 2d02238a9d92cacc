"""One launch of a case and what its ranks found; the tests and the page of the docs share it."""

from __future__ import annotations

from pathlib import Path

from tests.equivalence.cases import Case, case_of, lora_case
from tests.equivalence.layouts import MEASURED, Arrangement
from tests.equivalence.lora import ADAPTERS, save_lora_truth
from tests.equivalence.run import Errors, run_case
from tests.equivalence.truth import ModelFiles
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
    "nemotron": dict(kind="nemotron", seed=1, initializer_range=0.1),
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
    """Model directories and the folders of their truth, each made on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, ModelFiles] = {}

    def __call__(self, name: str) -> ModelFiles:
        """A model of `MODELS`, or one with the truth about adapters of `ADAPTERS`."""
        if name not in self._made:
            kind = ADAPTERS[name].model if name in ADAPTERS else name
            path = save_tiny_model(self._folder / name, **MODELS[kind])
            self._made[name] = ModelFiles(path, self._folder / f"{name}_truth")
            if name in ADAPTERS:
                save_lora_truth(self._made[name], ADAPTERS[name])
        return self._made[name]


def case_for(name: str, arrangement: Arrangement) -> Case:
    """What the suite and the page run of a model, or of one with adapters, in an arrangement."""
    among = MEASURED[name]
    return (
        lora_case(arrangement, among, ADAPTERS[name].lora)
        if name in ADAPTERS
        else case_of(arrangement, among)
    )


def launch(model: ModelFiles, case: Case) -> list[Errors]:
    """Run a case in as many processes as it has ranks; each rank's errors."""
    model.make(case.scenarios)
    return run_distributed(run_case, case.arrangement.world_size, model, case)


def worst_of(ranks: list[Errors]) -> Errors:
    """The largest error of each kind on any rank."""
    errors = Errors()
    for rank, of_rank in enumerate(ranks):
        errors.merge(of_rank, f"rank {rank}")
    return errors
