"""Estimated memory against measured memory, rank by rank, in many small layouts.

Real Megatron models are built by the project's own code on gloo processes, and one training step is taken. Parameters,
DistributedDataParallel's gradient buffers and the optimizer's state are summed over distinct storages; activations are
the peak of storages made and not yet freed during forward and backward (the whole second step is watched too, and the
higher peak counts). The plan gets the layout, the tokens of the longest micro-batch and, for experts, the mean rows
that the routers sent to the rank. Layers are the torch ones, on a CPU: ``Setting("torch", on_gpu=False)``.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks.common import SCHEMA, hardware, versions
from benchmarks.result_files import save
from megatron_gspo.config import ParallelConfig
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.models import family_of
from megatron_gspo.tools.plan.activations import peak_bytes
from megatron_gspo.tools.plan.layer_sizes import MicroBatch, Setting
from megatron_gspo.tools.plan.layouts import name_of
from megatron_gspo.tools.plan.model_states import exact_states
from megatron_gspo.tools.plan.plan_report import table
from tests.support.distributed import run_distributed
from tests.support.tiny_models import save_tiny_model, tiny_config

SIZES = dict(
    vocab_size=1027, hidden_size=96, num_attention_heads=8, num_key_value_heads=4, head_dim=16, intermediate_size=256,
    moe_intermediate_size=48,
)  # fmt: skip
TARGET = 0.10


@dataclass(frozen=True)
class Case:
    """A small model in a layout. ``kind``: ``dense``, ``moe``, or ``shared``, experts of which every token uses one.
    ``sizes``: of the parallel section, by first letters (tp, pp, vp, cp, ep, etp, sp, do:
    the distributed optimizer); ``lengths``: tokens of the mini-batch's sequences, one a micro-batch, or with ``packed``
    as many as fit into so many tokens."""

    kind: str
    world: int = 1
    sizes: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    recompute: str = "none"
    tied: bool = False
    lengths: tuple[int, ...] = (256,)
    layers: int = 4
    packed: int | None = None

    @property
    def parallel(self) -> ParallelConfig:
        keys = dict(
            tp="tensor_model_parallel_size", pp="pipeline_model_parallel_size", cp="context_parallel_size",
            vp="virtual_pipeline_model_parallel_size", ep="expert_model_parallel_size", do="use_distributed_optimizer",
            etp="expert_tensor_parallel_size", sp="sequence_parallel",
        )  # fmt: skip
        return ParallelConfig(**{keys[key]: value for key, value in self.sizes.items()})

    @property
    def model(self) -> dict[str, Any]:
        """Fields of the Hugging Face config."""
        common = SIZES | dict(num_hidden_layers=self.layers, tie_word_embeddings=self.tied)
        if self.kind == "dense":
            del common["moe_intermediate_size"]
        if self.kind == "shared":  # Qwen2-MoE, whose heads are hidden / heads wide
            common |= dict(head_dim=SIZES["hidden_size"] // SIZES["num_attention_heads"],
                           shared_expert_intermediate_size=160)  # fmt: skip
        return common

    @property
    def name(self) -> str:
        parallel = self.parallel
        words = [self.kind + (" tied" if self.tied else ""), self.dtype, name_of(parallel)]
        words += [f"DP{ranks}"] if (ranks := parallel.data_parallel_size(self.world)) > 1 else []
        words += ["no SP"] if self.sizes.get("sp") is False else []
        words += ["optimizer whole"] if not parallel.use_distributed_optimizer else []
        words += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        words += ["packed"] if self.packed else []
        return ", ".join(words)


def _cases() -> list[Case]:
    many, bf16 = (256,) * 4, dict(dtype="bfloat16")
    unequal = (60, 200, 90, 130, 250, 70, 110, 170, 80, 140, 40, 190)
    return [
        Case("dense"),
        Case("dense", tied=True, sizes=dict(do=False)),
        Case("dense", recompute="full", **bf16),
        Case("dense", recompute="selective"),
        Case("moe"),
        Case("moe", **bf16),
        Case("moe", recompute="selective", **bf16),
        Case("moe", recompute="full", tied=True),
        Case("dense", 2, dict(tp=2)),
        Case("dense", 2, dict(tp=2, sp=False), tied=True),
        Case("dense", 2, dict(cp=2), **bf16),
        Case("dense", 2, dict(cp=2, do=False)),
        Case("dense", 2, dict(pp=2), tied=True, lengths=many),
        Case("dense", 2, dict(pp=2, vp=2), lengths=many),
        Case("dense", 2, dict(), lengths=(256, 256)),
        Case("moe", 2, dict(tp=2)),
        Case("moe", 2, dict(tp=2, etp=2), **bf16),
        Case("moe", 2, dict(tp=2, ep=2), recompute="selective"),
        Case("moe", 2, dict(ep=2), lengths=(256, 256)),
        Case("moe", 2, dict(ep=2, do=False), lengths=(256, 256), **bf16),
        Case("moe", 2, dict(pp=2), lengths=many, recompute="full", **bf16),
        Case("dense", 4, dict(tp=4), **bf16),
        Case("dense", 4, dict(tp=2, cp=2), recompute="full"),
        Case("dense", 4, dict(tp=2, pp=2, vp=2), tied=True, lengths=many, **bf16),
        Case("dense", 4, dict(pp=4), lengths=(256,) * 6),
        Case("moe", 4, dict(tp=2, ep=2), lengths=(256, 256), **bf16),
        Case("moe", 4, dict(tp=2, pp=2, ep=2), lengths=many),
        Case("moe", 4, dict(ep=4), lengths=many, recompute="selective"),
        Case("moe", 4, dict(cp=2, ep=2), lengths=(256, 256)),
        Case("moe", 4, dict(pp=2, vp=2, ep=2), tied=True, lengths=(256,) * 8, **bf16),
        Case("moe", 4, dict(ep=2, etp=2), lengths=many),
        Case("shared"),
        Case("shared", 2, dict(tp=2, ep=2), **bf16),
        Case("shared", 2, dict(ep=2), lengths=(256, 256), recompute="selective"),
        Case("moe", 2, dict(ep=2), lengths=unequal, packed=384),
        Case("dense", 2, dict(cp=2), lengths=unequal, packed=384, recompute="selective", **bf16),
        Case("moe", 8, dict(tp=2, pp=2, ep=2, do=True), lengths=many, **bf16),
        Case("dense", 8, dict(tp=2, cp=2), lengths=(256, 256), recompute="selective"),
    ]


CASES = _cases()


def measure(rank: int, world_size: int, cases: list[tuple[Case, str]]) -> list[dict[str, Any]]:
    """This rank's bytes and place in each case; all of the same world."""
    from megatron.core import parallel_state

    from megatron_gspo.mcore.process_groups import initialize

    found = []
    for case, path in cases:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        groups = initialize(case.parallel, seed=1)
        place = dict(stage=groups.pp.rank(), data_rank=groups.dp_cp.rank(),
                     expert_data_rank=parallel_state.get_expert_data_parallel_rank())  # fmt: skip
        found.append(place | _measure(case, path, groups))
    return found


def _measure(case: Case, path: str, groups: Any) -> dict[str, Any]:
    from benchmarks.live_storages import LiveStorages, storage_bytes
    from megatron_gspo.algorithms import preset
    from megatron_gspo.config import ModelConfig, OptimizerConfig, TrainingConfig
    from megatron_gspo.mcore.policy import build_policy
    from megatron_gspo.mcore.policy_tensors import gradients, optimizer_states, weights
    from megatron_gspo.mcore.train_step import forward_backward, pack_mini_batch, train_mini_batch

    model = ModelConfig(path=path, init="random", dtype=case.dtype, implementation="torch",
                        recompute_granularity=case.recompute)  # fmt: skip
    optimizer = OptimizerConfig(lr=1e-4, weight_decay=0.0)
    policy = build_policy(model, case.parallel, groups, optimizer=optimizer)
    samples = make_samples(case.lengths)
    objective = preset("gspo")
    training = TrainingConfig(
        steps=1, global_batch_size=1, max_tokens_per_micro_batch=case.packed or sum(case.lengths),
        micro_batch_size=None if case.packed else 1,
    )  # fmt: skip
    batches = pack_mini_batch(
        policy, SampleBatch.of(samples), training, optional=["old_log_probs", "advantages"], routing=None
    )
    rows = _count_expert_rows(policy)
    with LiveStorages() as first:
        forward_backward(policy, objective, batches, temperature=1.0)
    mean_rows = float(np.mean(rows)) if rows else None
    policy.optimizer.step()
    with LiveStorages() as second:
        train_mini_batch(policy, SampleBatch.of(samples), objective, training, temperature=1.0)
    states = optimizer_states(policy.chunks, policy.optimizer)
    return dict(
        weights=sum(storage_bytes(weights(policy.chunks)).values()),
        gradients=sum(storage_bytes(gradients(policy.chunks)).values()), optimizer=sum(storage_bytes(states).values()),
        activations=max(first.peak, second.peak), at=first.at, expert_rows=mean_rows,
        tokens=max(int(batch.tokens.shape[0]) for batch in batches.batches), micro_batches=len(batches.batches),
        scored=max(_scored(batch, groups) for batch in batches.batches),
    )  # fmt: skip


def _scored(batch: Any, groups: Any) -> int:
    """Trained positions of this context-parallel rank."""
    from megatron_gspo.data.packing import context_parallel_shard

    return int(context_parallel_shard(batch, groups.cp.rank(), groups.cp.size()).loss_mask.count_nonzero())


def _count_expert_rows(policy: Any) -> list[int]:
    from megatron_gspo.mcore.forward_step import unwrap
    from megatron_gspo.mcore.routing_replay.router_hooks import moe_layers

    rows: list[int] = []
    for chunk in policy.chunks:
        for layer in moe_layers(unwrap(chunk)):
            layer.mlp.experts.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[0]))
    return rows


def make_samples(lengths: Sequence[int]) -> list[Any]:
    """Samples of these lengths, a quarter of each the prompt."""
    from megatron_gspo.data.sample import Sample

    random = np.random.default_rng(0)
    samples = []
    for i, length in enumerate(lengths):
        response = length - length // 4
        samples.append(Sample(
            prompt_index=i // 2, sample_index=i % 2, tokens=random.integers(2, 1000, length), prompt_length=length // 4,
            loss_mask=np.ones(response, bool), rollout_log_probs=None, finish_reason="stop",
            advantages=np.full(response, random.normal()).astype(np.float32),
        ))  # fmt: skip
        samples[-1].old_log_probs = np.full(response, -6.9, np.float32)
    return samples


def planned(case: Case, measured: dict[str, Any], *, even: bool = False) -> dict[str, float]:
    """The plan's estimate of that rank; ``even``: with an even share of the experts' rows."""
    shape = family_of(tiny_config(case.kind, **case.model).to_dict())[1]
    width = 4 if case.dtype == "float32" else 2
    places = measured["data_rank"], measured["expert_data_rank"]
    states = exact_states(shape, case.parallel, case.world, measured["stage"], width, places)
    batch = MicroBatch(measured["tokens"], max(case.lengths), None if even else measured["expert_rows"],
                       measured["scored"])  # fmt: skip
    setting = Setting(width, "torch", case.recompute, on_gpu=False)
    peak = peak_bytes(shape, case.parallel, measured["stage"], batch, measured["micro_batches"], setting)
    return dict(asdict(states), activations=peak["total"])


PARTS = ("weights", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class Result:
    """Of one case: bytes by part, measured and planned, of each rank."""

    case: Case
    measured: list[dict[str, Any]]
    planned: list[dict[str, float]]
    even: list[dict[str, float]]

    def exact(self) -> bool:
        """Whether parameters, gradients and optimizer agree to the byte on every rank."""
        return all(m[part] == p[part] for m, p in zip(self.measured, self.planned, strict=True) for part in PARTS[:3])

    def errors(self, *, even: bool = False) -> tuple[float, float]:
        """(total, activations): planned / measured - 1 of the rank that is farthest off in each."""
        pairs = list(zip(self.measured, self.even if even else self.planned, strict=True))
        totals = [sum(p[part] for part in PARTS) / sum(m[part] for part in PARTS) - 1 for m, p in pairs]
        return max(totals, key=abs), max((p["activations"] / m["activations"] - 1 for m, p in pairs), key=abs)

    def to_json(self) -> dict[str, Any]:
        total, activations = self.errors()
        return dict(layout=self.case.name, case=asdict(self.case), measured=self.measured, planned=self.planned,
                    exact=self.exact(), total_error=total, activations_error=activations,
                    total_error_even_rows=self.errors(even=True)[0])  # fmt: skip


def run(cases: Sequence[Case], timeout: float = 240.0) -> list[Result]:
    """Measure and plan the cases, those of one world in the same processes."""
    found: dict[int, Result] = {}
    by_world: dict[int, list[tuple[int, Case]]] = {}
    for number, case in enumerate(cases):
        by_world.setdefault(case.world, []).append((number, case))
    for world, group in by_world.items():
        with tempfile.TemporaryDirectory() as folder:
            work = []
            for number, case in group:
                work.append((case, save_tiny_model(Path(folder) / str(number), case.kind, **case.model)))
            ranks = run_distributed(measure, world, work, timeout=timeout)
        for index, (number, case) in enumerate(group):
            measured = [rank[index] for rank in ranks]
            both = [[planned(case, own, even=even) for own in measured] for even in (False, True)]
            found[number] = Result(case, measured, *both)
    return [found[number] for number in range(len(cases))]


def _percent(error: float) -> str:
    return f"{100 * error:+.1f} %".replace("-0.0", "0.0").replace("+0.0", "0.0")


def results_table(results: Sequence[Result]) -> str:
    """One row a layout: the fullest rank's bytes and both errors."""
    rows = [["model and layout", "ranks", "states", "measured KiB", "of these activations", "total off by",
             "activations off by"]]  # fmt: skip
    for result in results:
        fullest = max(result.measured, key=lambda own: sum(own[part] for part in PARTS))
        total, activations = result.errors()
        rows.append([
            result.case.name, str(result.case.world), "exact" if result.exact() else "NOT EXACT",
            f"{sum(fullest[part] for part in PARTS) / 1024:,.0f}", f"{fullest['activations'] / 1024:,.0f}",
            _percent(total), _percent(activations),
        ])  # fmt: skip
    return table(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="*", default=[1, 2, 4, 8], help="sizes to run (default: all)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    started, machine = time.perf_counter(), hardware()
    results = run([case for case in CASES if case.world in args.worlds])
    print(results_table(results))
    worst = max((result.errors()[0] for result in results), key=abs)
    uneven = max((result.errors(even=True)[0] for result in results), key=abs)
    exact = all(result.exact() for result in results)
    print(f"\n{len(results)} layouts; states {'exact in all' if exact else 'NOT exact in all'}; totals off by at most "
          f"{100 * abs(worst):.1f} % (target {100 * TARGET:.0f} %), by {100 * abs(uneven):.1f} % if the plan isn't\n"
          "told how many rows the routers sent to a rank")  # fmt: skip
    if args.json:
        record = dict(schema=SCHEMA, date=datetime.date.today().isoformat(), hardware=machine, versions=versions(),
                      command="OMP_NUM_THREADS=1 python benchmarks/plan_memory.py", target=TARGET, exact=exact,
                      worst_total_error=worst, worst_total_error_even_rows=uneven,
                      seconds=time.perf_counter() - started,
                      layouts=[result.to_json() for result in results])  # fmt: skip
        save(args.json, record)
    return 0 if exact and abs(worst) <= TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
