"""One layer and the log-prob head of Qwen3-30B-A3B on one GPU, in bfloat16: time, share of the
GPU's peak, memory.

Random weights, packed sequences of 4,096 tokens of which three quarters are responses. Rows:

- a large matrix product: what the GPU reaches at best;
- the layer (attention and 128 experts, top 8), forward and backward, with the embedding before it
  and the norm after;
- the head (vocabulary 151,936), forward and backward, for all positions;
- a training step: two micro-batches with the policy loss, then the optimizer; of the layer,
  embedding and head.

Layers are torch's and, where installed, Transformer Engine's. *TFLOP/s* counts the products that a
step needs (`megatron_gspo/models/flops.py`): 2 for each weight that a token meets, attention by the
keys that a query attends, twice as many backward; what is computed again does not count. The peak
is the data sheet's for dense bfloat16 (`megatron_gspo/gpus.py`) or ``--peak-tflops``. Memory is the
allocator's peak, weights and optimizer included; beside it, for the step, the rehearsal's figure.

    python benchmarks/gpu.py                  # writes benchmarks/results/gpu/<date>-<gpu>.json
    python benchmarks/gpu.py --config DIR     # writes the step's config, to be rehearsed
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import yaml

from benchmarks.common import (
    RESULTS,
    ROOT,
    Spread,
    hardware,
    machine_kind,
    number,
    say,
    timed,
    versions,
)
from benchmarks.result_files import save

MODEL = ROOT / "examples" / "qwen3_moe" / "models" / "Qwen3-30B-A3B" / "config.json"
IMPLEMENTATIONS = ("torch", "transformer_engine")


@dataclass(frozen=True)
class Sizes:
    """``model``: changes to the model's config.json. A micro-batch has ``sequences`` of ``prompt``
    and ``response`` tokens. ``square``: of the matrix product. ``expert_parallel``: GPUs that share
    the experts. ``centred_by``: ids of a position, with which the head's scores are centred in
    another row; 0: there is none."""

    model: dict[str, Any]
    expert_parallel: int = 1
    centred_by: int = 0
    sequences: int = 4
    prompt: int = 1024
    response: int = 3072
    square: int = 8192
    repeats: int = 10
    warmup: int = 3

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.sequences * (self.prompt + self.response)


REAL = Sizes({"num_hidden_layers": 1})
TINY = Sizes(
    dict(
        num_hidden_layers=1,
        hidden_size=32,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        intermediate_size=32,
        vocab_size=96,
    ),
    sequences=2,
    prompt=4,
    response=12,
    square=64,
    repeats=2,
    warmup=1,
)


@dataclass(frozen=True)
class Row:
    """``milliseconds`` of a call. ``tflops`` and its share of the peak (None where the peak is not
    known). ``peak_bytes``: allocated at most, None on a CPU; ``rehearsed_bytes``: the same figure
    of the rehearsal.
    """

    name: str
    implementation: str
    tokens: int
    milliseconds: Spread
    tflops: float
    share_of_peak: float | None
    peak_bytes: int | None
    rehearsed_bytes: int | None = None


@dataclass(frozen=True)
class Work:
    """Something to measure: one call, its floating-point operations and the tokens that it is
    about.
    """

    name: str
    implementation: str
    tokens: int
    flops: float
    call: Callable[[], Any]


def layer_flops(shape: Any, lengths: Sequence[int]) -> float:
    """Of a forward pass of all layers over sequences of these lengths."""
    from megatron_gspo.models.flops import forward_flops

    return float(forward_flops(shape, np.array(lengths), np.zeros(len(lengths))).total.sum())


def head_flops(shape: Any, tokens: int) -> float:
    """Of a forward pass of the head."""
    return 2.0 * tokens * shape.hidden_size * shape.vocab_size


def peak_tflops(gpu: str | None) -> float | None:
    """Dense bfloat16 of a GPU by its driver's name; None where it is not known."""
    from megatron_gspo.gpus import gpu_of_device

    known = gpu_of_device(gpu or "")
    return None if known is None else known.flops / 1e12


def write_config(folder: Path, sizes: Sizes, implementation: str = "torch") -> Path:
    """The step as a config of a run, with its model's config.json beside it; returns the file."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(model_config(sizes)))
    config = {
        "run_dir": str(folder / "run"),
        "model": {
            "path": str(model),
            "init": "random",
            "dtype": "bfloat16",
            "implementation": implementation,
        },
        "data": {"task": {"name": "spell_backward", "size": 64}, "max_prompt_length": sizes.prompt},
        "rollout": {
            "rollout_batch_size": sizes.sequences,
            "n_samples_per_prompt": 2,
            "max_response_length": sizes.response,
        },
        "algorithm": {"name": "gspo"},
        "parallel": {"expert_model_parallel_size": sizes.expert_parallel},
        "training": {
            "steps": 1,
            "global_batch_size": 2 * sizes.sequences,
            "max_tokens_per_micro_batch": sizes.tokens,
        },
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    return file


def make_samples(sizes: Sizes, vocabulary: int, count: int) -> list[Any]:
    """Random samples of the sizes, with what an objective with a ratio needs."""
    from megatron_gspo.data.sample import Sample

    g = np.random.default_rng(0)
    responses = [
        dict(
            old_log_probs=np.full(sizes.response, -8.0, dtype=np.float32),
            advantages=g.normal(size=sizes.response).astype(np.float32),
        )
        for _ in range(count)
    ]
    return [
        Sample(
            i,
            0,
            g.integers(2, vocabulary, sizes.prompt + sizes.response),
            sizes.prompt,
            np.ones(sizes.response, dtype=bool),
            None,
            "stop",
            **fields,
        )
        for i, fields in enumerate(responses)
    ]


def product(sizes: Sizes, device: torch.device) -> Work:
    """A square matrix product."""
    a, b = (
        torch.randn(sizes.square, sizes.square, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    return Work("matrix product", "torch", sizes.square, 2.0 * sizes.square**3, lambda: a @ b)


def model_config(sizes: Sizes) -> dict[str, Any]:
    """The content of the model's config.json."""
    return json.loads(MODEL.read_text()) | sizes.model


def head(
    sizes: Sizes,
    shape: Any,
    device: torch.device,
    logit_bytes: int | None = None,
    centred_by: int = 0,
) -> Work:
    """Log-probs of all positions and their gradients. logit_bytes: budget; None is the default.
    centred_by: ids of a position whose log-probs centre its score."""
    from megatron_gspo.algorithms import ScoreCentering, centering
    from megatron_gspo.parallel.log_probs import LogProbOptions, log_probs_from_hidden

    options = LogProbOptions(chunk_bytes=logit_bytes)

    hidden = torch.randn(sizes.tokens, shape.hidden_size, device=device, dtype=torch.bfloat16)
    weight = (
        torch.randn(shape.vocab_size, shape.hidden_size, device=device, dtype=torch.bfloat16) * 0.02
    )
    labels = torch.randint(shape.vocab_size, (sizes.tokens, 1 + centred_by), device=device)
    of_engine = torch.full((sizes.tokens, centred_by), -5.0, device=device)

    def run() -> None:
        leaves = [tensor.detach().requires_grad_() for tensor in (hidden, weight)]
        log_probs, _ = log_probs_from_hidden(*leaves, labels, options)
        loss = log_probs[:, 0]
        if centred_by:
            loss = loss + centering(ScoreCentering(), log_probs[:, 1:], of_engine)
        loss.mean().backward()

    name = "centred head" if centred_by else "head"
    return Work(name, "torch", sizes.tokens, 3 * head_flops(shape, sizes.tokens), run)


def layer(policy: Any, sizes: Sizes, implementation: str) -> Work:
    """Hidden states of a micro-batch and the gradients of the weights."""
    from megatron_gspo.data.packing import pack
    from megatron_gspo.mcore.forward_step import hidden_states
    from megatron_gspo.mcore.process_groups import compute_device

    samples = make_samples(sizes, policy.shape.vocab_size, sizes.sequences)
    host = pack(samples, num_sequences=len(samples), num_tokens=sizes.tokens)
    batch = replace(host.to(compute_device()), cu_seqlens=host.cu_seqlens)

    def run() -> None:
        hidden_states(policy.chunks[0], batch, policy.groups).mean().backward()

    flops = 3 * layer_flops(policy.shape, [sample.length for sample in samples])
    return Work("layer", implementation, sizes.tokens, flops, run)


def step(policy: Any, config: Any, sizes: Sizes, implementation: str) -> Work:
    """A mini-batch of two micro-batches and the optimizer."""
    from megatron_gspo.algorithms import preset
    from megatron_gspo.data.training_batch import TrainingBatch
    from megatron_gspo.mcore.train_step import train_mini_batch

    samples = make_samples(sizes, policy.shape.vocab_size, 2 * sizes.sequences)

    def run() -> None:
        train_mini_batch(
            policy, TrainingBatch.of(samples), preset("gspo"), config.training, temperature=1.0
        )

    trained = sum(sample.response_length for sample in samples)
    flops = 3 * (
        layer_flops(policy.shape, [sample.length for sample in samples])
        + head_flops(policy.shape, trained)
    )
    return Work("training step", implementation, 2 * sizes.tokens, flops, run)


def measured(work: Work, sizes: Sizes, peak: float | None, rehearsed: int | None = None) -> Row:
    """Time and memory of some work."""
    cuda = torch.cuda.is_available()

    def call() -> None:
        work.call()
        if cuda:
            torch.cuda.synchronize()

    for _ in range(sizes.warmup):
        call()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    spread = Spread.of([1e3 * timed(call).wall for _ in range(sizes.repeats)])
    tflops = work.flops / spread.median / 1e9
    return Row(
        work.name,
        work.implementation,
        work.tokens,
        spread,
        tflops,
        None if peak is None else tflops / peak,
        torch.cuda.max_memory_allocated() if cuda else None,
        rehearsed,
    )


def works(sizes: Sizes) -> Iterator[Work]:
    """What is measured, one after the other."""
    from megatron_gspo.config import load_config
    from megatron_gspo.mcore.layers import transformer_engine_available
    from megatron_gspo.mcore.policy import build_policy
    from megatron_gspo.mcore.process_groups import compute_device, initialize, shutdown
    from megatron_gspo.models import family_of

    with tempfile.TemporaryDirectory() as folder:
        file = write_config(Path(folder), sizes)
        config = load_config(file)
        device = compute_device()
        groups = initialize(config.parallel, seed=0)
        try:
            _, shape = family_of(model_config(sizes))
            yield product(sizes, device)
            yield head(sizes, shape, device)
            if sizes.centred_by:
                yield head(sizes, shape, device, centred_by=sizes.centred_by)
            for implementation in IMPLEMENTATIONS:
                if implementation == "transformer_engine" and not transformer_engine_available():
                    say("Transformer Engine is not installed: its rows are left out")
                    continue
                model = replace(config.model, implementation=implementation)
                policy = build_policy(
                    model, config.parallel, groups, optimizer=config.optimizer, total_steps=100
                )
                yield layer(policy, sizes, implementation)
                yield step(policy, config, sizes, implementation)
                del policy
                gc.collect()  # its modules and buffers refer to each other
        finally:
            shutdown()


def measure(sizes: Sizes, peak: float | None, rehearsed: int | None = None) -> Iterator[Row]:
    """All rows, one after the other; ``rehearsed``: bytes of the step with torch layers."""
    for work in works(sizes):
        is_rehearsed = (work.name, work.implementation) == ("training step", "torch")
        yield measured(work, sizes, peak, rehearsed if is_rehearsed else None)
        del work  # its policy ends before the next one is built


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| what | layers | ms | TFLOP/s | of the peak | memory | rehearsed |",
        "| --- " * 7 + "|",
    ]
    for row in rows:
        share = "" if row.share_of_peak is None else f"{100 * row.share_of_peak:.0f} %"
        memory = [
            "" if size is None else f"{size / 2**30:.2f} GiB"
            for size in (row.peak_bytes, row.rehearsed_bytes)
        ]
        cells = [
            f"{row.name}, {row.tokens:,} tokens",
            row.implementation,
            number(row.milliseconds.median),
            number(row.tflops),
            share,
            *memory,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def result(rows: Sequence[Row], peak: float | None) -> dict[str, Any]:
    """What is written: date, hardware, versions and the rows."""
    torch_build = {"cuda": torch.version.cuda, "nccl": None}
    if torch.cuda.is_available():
        torch_build["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions() | torch_build,
        "peak_tflops": peak,
        "rows": [asdict(row) for row in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peak-tflops", type=float, help="of the GPU in bfloat16; default: by its name"
    )
    parser.add_argument(
        "--rehearsed",
        type=Path,
        help="JSON that megatron-gspo rehearse wrote for the step's config",
    )
    parser.add_argument(
        "--config", type=Path, help="write the step's config into this folder and end"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS / "gpu", help="folder (default: %(default)s)"
    )
    args = parser.parse_args()
    if args.config:
        print(write_config(args.config, REAL))
        return
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py: skipped: no CUDA GPU")
        return
    rehearsed = (
        json.loads(args.rehearsed.read_text())["roles"][0]["peak_bytes"] if args.rehearsed else None
    )
    peak = args.peak_tflops or peak_tflops(torch.cuda.get_device_name())
    rows: list[Row] = []
    for row in measure(REAL, peak, rehearsed):
        rows.append(row)
        report = result(rows, peak)
        args.results.mkdir(parents=True, exist_ok=True)
        file = args.results / f"{report['date']}-{machine_kind(report['hardware'])}.json"
        save(file, report)  # after each: what is measured is kept if the next one fails
    print(table(rows))
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
