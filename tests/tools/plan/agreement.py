"""The plan's figures against those of rehearsals, rank by rank: ``python -m tests.tools.plan.agreement [NAME ...]``.

Each layout is rehearsed with few layers and short sequences, for a rank of its first, second and last pipeline stage.
NAME selects layouts by a part of their names. ``--records FOLDER`` keeps the records and reads those it has, so that a
run that was stopped can go on; ``--json FILE`` is written after each layout. Exit code: 0; 1 where states or bytes
differ, or activations by 5 %.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from benchmarks.common import versions
from benchmarks.result_files import save
from megatron_gspo.config import Config, load_config
from megatron_gspo.models import family_of, read_config
from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.tools.plan.activations import peak_bytes
from megatron_gspo.tools.plan.communication import mini_batch_bytes
from megatron_gspo.tools.plan.layer_sizes import MicroBatch, Setting
from megatron_gspo.tools.plan.model_states import exact_states
from megatron_gspo.tools.plan.plan_report import table
from megatron_gspo.tools.rehearse.one_rank import shortened_model
from megatron_gspo.tools.rehearse.rank_processes import RankJob, rehearse_ranks
from megatron_gspo.tools.rehearse.records import Collective, RankRecord, read_record, write_record
from megatron_gspo.tools.rehearse.roles import choose_ranks
from megatron_gspo.tools.rehearse.summary import FailedRank

EXAMPLES = Path(__file__).parents[3] / "examples"
STATES = ("weights", "gradients", "optimizer")
GROUPS = {"tp": "tensor", "cp": "context", "ep": "expert", "expert_tp": "expert tensor"}
DATA_GROUPS = {"dp_cp": "", "expert_dp": "expert "}
STEP = ("forward_backward", "optimizer")
LEAST = 2**20  # bytes of a tensor
PROMPT, RESPONSE = 512, 1536  # tokens
KEYS = dict(
    tp="parallel.tensor_model_parallel_size", pp="parallel.pipeline_model_parallel_size",
    vp="parallel.virtual_pipeline_model_parallel_size", cp="parallel.context_parallel_size",
    ep="parallel.expert_model_parallel_size", etp="parallel.expert_tensor_parallel_size",
    recompute="model.recompute_granularity", overlap="parallel.overlap_grad_reduce",
    gather="parallel.overlap_param_gather", lora="lora.rank", targets="lora.targets", adapters="lora.experts",
    embedding="parallel.account_for_embedding_in_pipeline_split", loss="parallel.account_for_loss_in_pipeline_split",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """A ready config, or a variant of it by ``changes`` of `KEYS`, on ``world`` GPUs with ``layers`` layers."""

    name: str
    file: str
    world: int
    layers: int
    changes: tuple[tuple[str, object], ...] = ()

    @property
    def path(self) -> str:
        return str(next(EXAMPLES.glob(f"*/{self.file}.yaml")))

    @property
    def overrides(self) -> tuple[str, ...]:
        """Two sequences a micro-batch, and more micro-batches than a rehearsal runs."""
        published = Path(load_config(self.path).model.path or "").name
        model = Path(self.path).parent / "models" / published
        found = [f"model.path={model}", *(f"{KEYS[key]}={value}" for key, value in self.changes)]
        parallel = load_config(self.path, found).parallel
        batch = 2 * parallel.data_parallel_size(self.world) * 2 * max(parallel.pipeline_model_parallel_size, 1)
        return (*found, f"data.max_prompt_length={PROMPT}", f"rollout.max_response_length={RESPONSE}",
                f"training.max_tokens_per_micro_batch={2 * (PROMPT + RESPONSE)}",
                f"training.global_batch_size={batch}")  # fmt: skip

    @property
    def config(self) -> Config:
        return load_config(self.path, self.overrides)

    @property
    def shape(self) -> ModelShape:
        with tempfile.TemporaryDirectory() as folder:
            path = shortened_model(self.config.model.path or "", self.layers, Path(folder))
            return family_of(read_config(path))[1]

    @property
    def ranks(self) -> str:
        """The first of each of the first two pipeline stages, and the last of the last."""
        stages = self.config.parallel.pipeline_model_parallel_size
        first = [str(stage * self.world // stages) for stage in range(max(min(stages - 1, 2), 1))]
        return ",".join([*first, *([str(self.world - 1)] if stages > 1 else [])])


def variant(file: str, world: int, layers: int, **changes: object) -> Layout:
    """A layout named by its model and changes."""
    words = [f"{key}={value}" for key, value in changes.items()]
    size = next(word for word in file.split("_") if re.fullmatch(r"\d+b", word))
    return Layout(" ".join([size, *words]), file, world, layers, tuple(changes.items()))


SMALL, LARGE = "qwen3_30b_a3b_4x8_gspo", "qwen3_235b_a22b_24x8_gspo"
NEXT, MINIMAX = "qwen3_next_80b_a3b_6x8_gspo", "minimax_m2_230b_a10b_24x8_gspo"
MOONLIGHT, GLM_AIR = "moonlight_16b_a3b_2x8_gspo", "glm45_air_106b_a12b_10x8_gspo"
GPT_OSS, QWEN35 = "gpt_oss_20b_1x8_80gb_gspo", "qwen35_35b_a3b_1x8_141gb_gspo"
LAYOUTS = (
    Layout("30b_4x8_gspo", SMALL, 16, 2),
    Layout("30b_1x8_80gb_gspo", "qwen3_30b_a3b_1x8_80gb_gspo", 8, 2),
    Layout("30b_1x8_141gb_gspo", "qwen3_30b_a3b_1x8_141gb_gspo", 8, 8),
    Layout("30b_4x8_grpo_r2", "qwen3_30b_a3b_4x8_grpo_r2", 16, 2),
    variant(SMALL, 8, 2, tp=1, ep=8, recompute="none"),
    variant(SMALL, 16, 2, tp=2, ep=8, recompute="selective", overlap="false"),
    variant(SMALL, 8, 4, tp=1, pp=2, ep=4, recompute="none"),
    variant(SMALL, 8, 4, tp=1, pp=2, vp=2, ep=4),
    variant(SMALL, 16, 2, tp=1, cp=2, ep=8),
    variant(SMALL, 16, 2, tp=2, cp=2, ep=4, recompute="none"),
    variant(SMALL, 16, 2, tp=2, ep=4, etp=2),
    variant(SMALL, 16, 2, tp=2, ep=8, gather="true"),
    variant(SMALL, 8, 2, tp=1, ep=8, lora=8),
    variant(SMALL, 16, 2, tp=2, ep=8, recompute="none", lora=16, overlap="false"),
    variant(SMALL, 8, 4, tp=1, pp=2, ep=4, recompute="selective", lora=8, targets="[q_proj,v_proj]"),
    variant(SMALL, 16, 2, tp=2, cp=2, ep=4, etp=2, lora=8, adapters="shared"),
    Layout("235b_24x8_gspo", LARGE, 128, 14),
    variant(LARGE, 64, 6, tp=4, pp=4, vp="null", ep=16),
    variant("qwen3_30b_a3b_4x8_gspo", 16, 4, tp=2, pp=4, ep=2),
    Layout("80b_6x8_gspo", NEXT, 32, 8),
    variant(NEXT, 8, 4, pp=1, ep=8),
    variant(NEXT, 8, 4, pp=1, ep=8, recompute="none"),
    variant(NEXT, 8, 4, pp=1, tp=2, cp=2, ep=8, recompute="none"),
    variant(NEXT, 8, 8, pp=2, vp=2, ep=4, recompute="selective"),
    variant(MINIMAX, 8, 2, tp=1, pp=1, vp="null", ep=8, recompute="none", embedding="false", loss="false"),
    variant(MINIMAX, 16, 2, tp=4, pp=1, vp="null", cp=2, ep=8, embedding="false", loss="false"),
    variant(MINIMAX, 16, 6, tp=2, pp=4, vp="null", ep=4),
    variant(MOONLIGHT, 8, 2, ep=8),
    variant(MOONLIGHT, 8, 2, tp=2, cp=2, ep=8, recompute="none"),
    variant(GLM_AIR, 8, 2, tp=2, pp=1, ep=8, embedding="false", loss="false"),
    variant(GLM_AIR, 8, 4, tp=2, pp=2, ep=4, recompute="none", embedding="false", loss="false"),
    variant(GPT_OSS, 8, 2, tp=2, ep=8),
    variant(GPT_OSS, 8, 2, tp=1, ep=8, recompute="none"),
    variant(QWEN35, 8, 4, tp=2, ep=8),
    variant(QWEN35, 8, 4, tp=1, ep=8, recompute="none"),
)


def records(layout: Layout, folder: Path | None = None) -> list[RankRecord]:
    """The rehearsals of a layout's ranks. Raises ``RuntimeError`` if one fails."""
    played = choose_ranks(layout.config.parallel, layout.world, layout.ranks)
    kept = {one: folder / f"{layout.name.replace(' ', ',')}_{one.rank}.json" for one in played} if folder else {}
    missing = [one for one in played if one not in kept or not kept[one].exists()]
    job = RankJob(layout.path, layout.overrides, layout.world, layout.layers)
    found, failed = rehearse_ranks(job, missing, 1, lambda *_: None)
    for failure in failed:
        raise RuntimeError(f"{layout.name}: {_failure(failure)}")
    for record in found if kept else ():
        write_record(record, next(path for one, path in kept.items() if one.rank == record.rank))
    found += [read_record(path) for one, path in kept.items() if one not in missing]
    return sorted(found, key=lambda record: record.rank)


def _failure(failure: FailedRank) -> str:
    return f"rank {failure.rank}: {failure.message}"


def scored_positions(config: Config, record: RankRecord) -> int:
    """Positions of a micro-batch on which the record's rank computes log-probs.

    The context-parallel rank has the chunks i and 2 CP - 1 - i of each sequence. With sequence parallelism every
    tensor-parallel rank sends as many of its part as the one that has most.
    """
    ranks, place = config.parallel.context_parallel_size, record.coordinates["cp"]
    prompt, length = config.data.max_prompt_length, config.data.max_prompt_length + config.rollout.max_response_length
    chunk = length // (2 * ranks)
    own = [start + i for start in (place * chunk, (2 * ranks - 1 - place) * chunk) for i in range(chunk)]
    trained = [prompt - 1 <= position < length - 1 for position in own] * (max(record.micro_batches) // length)
    parts = config.parallel.tensor_model_parallel_size if config.parallel.use_sequence_parallel else 1
    size = len(trained) // parts
    return parts * max(sum(trained[i * size : (i + 1) * size]) for i in range(parts))


def planned(layout: Layout, record: RankRecord) -> tuple[dict[str, int], dict[str, int]]:
    """Of the record's rank: bytes of states and the peak of activations; bytes of collectives."""
    config, shape = layout.config, layout.shape
    parallel, stage, count = config.parallel, record.coordinates["pp"], len(record.micro_batches)
    places = record.groups["dp_cp"].index(record.rank), record.groups["expert_dp"].index(record.rank)
    states = exact_states(shape, parallel, record.world, stage, 2, places, config.trained_lora)
    length = config.data.max_prompt_length + config.rollout.max_response_length
    batch = MicroBatch(max(record.micro_batches), length, scored=scored_positions(config, record))
    setting = Setting(2, "torch", config.model.recompute_granularity, lora=config.trained_lora)
    peak = peak_bytes(shape, parallel, stage, batch, count, setting)
    memory = {name: getattr(states, name) for name in STATES} | {"activations": round(peak["total"])}
    return memory, mini_batch_bytes(shape, parallel, record.world, stage, batch, count, setting)


def rehearsed(record: RankRecord) -> dict[str, int]:
    """The same of the rehearsal; the micro-batches' inputs are apart."""
    return dict(record.memory.states) | {"activations": record.memory.peak_activations.bytes["activations"]}


def rehearsed_traffic(record: RankRecord) -> dict[str, int]:
    """The same of the rehearsal. Left out: sums over ranks, of the norms' and routers' gradients, and within a
    replica tensors below `LEAST` bytes, such as counts, experts' probabilities and the head's statistics."""
    found: Counter[str] = Counter()
    for one in _of_step(record):
        if _is_compared(one):
            found[_purpose(one)] += one.bytes
    return dict(found)


def share_left_out(record: RankRecord) -> float:
    """What `rehearsed_traffic` leaves out, of all bytes of the step's collectives."""
    sizes = [(one.bytes, _is_compared(one)) for one in _of_step(record)]
    return sum(size for size, compared in sizes if not compared) / max(sum(size for size, _ in sizes), 1)


def _of_step(record: RankRecord) -> list[Collective]:
    """Those of more than one rank. overlap_param_gather leaves the weights to the next forward pass: here the log-prob
    pass."""
    return [one for one in record.collectives if len(one.ranks) > 1 and one.dtype != "object"
            and one.phase in (("old_log_probs", *STEP) if one.group in DATA_GROUPS else STEP)]  # fmt: skip


def _is_compared(one: Collective) -> bool:
    return (one.group in DATA_GROUPS or one.bytes >= LEAST) and one.op != "allreduce"


def _purpose(one: Collective) -> str:
    if one.op in ("send", "recv"):  # two stages use the group of all ranks too
        return "pipeline"
    if one.group in DATA_GROUPS:
        return f"{DATA_GROUPS[one.group]}{'weights' if one.dtype == 'bfloat16' else 'gradients'}"
    return GROUPS.get(one.group, one.group)


@dataclass(frozen=True)
class Comparison:
    """Of one rank: figures by name, planned and rehearsed."""

    name: str
    planned: dict[str, int]
    rehearsed: dict[str, int]
    planned_traffic: dict[str, int]
    rehearsed_traffic: dict[str, int]
    left_out: float = 0.0  # share of the collectives' bytes

    @property
    def agrees(self) -> bool:
        return self.states_agree and abs(self.activations_off) < 0.05 and not self.unequal_traffic

    @property
    def states_agree(self) -> bool:
        return all(self.planned[name] == self.rehearsed[name] for name in STATES)

    @property
    def activations_off(self) -> float:
        return self.planned["activations"] / self.rehearsed["activations"] - 1

    @property
    def unequal_traffic(self) -> list[str]:
        """Groups whose bytes differ, with planned over rehearsed."""
        names = sorted(self.planned_traffic.keys() | self.rehearsed_traffic.keys())
        both = {name: (self.planned_traffic.get(name, 0), self.rehearsed_traffic.get(name, 0)) for name in names}
        return [f"{name} {own:,}/{other:,}" for name, (own, other) in both.items() if own != other]


def compare(layout: Layout, record: RankRecord) -> Comparison:
    memory, traffic = planned(layout, record)
    return Comparison(f"{layout.name} rank {record.rank}", memory, rehearsed(record), traffic,
                      rehearsed_traffic(record), share_left_out(record))  # fmt: skip


def comparison_table(found: Sequence[Comparison]) -> str:
    rows = [["layout", *STATES, "activations planned", "rehearsed", "off by", "collectives", "left out"]]
    for one in found:
        states = [f"{one.planned[name] - one.rehearsed[name]:+,}".replace("+0", "equal") for name in STATES]
        peaks = [f"{side['activations'] / 2**20:,.0f} MiB" for side in (one.planned, one.rehearsed)]
        traffic = "; ".join(one.unequal_traffic) or f"equal: {', '.join(one.planned_traffic)}"
        rows.append([one.name, *states, *peaks, f"{100 * one.activations_off:+.1f} %", traffic,
                     f"{100 * one.left_out:.2f} %"])  # fmt: skip
    return table(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="part of a layout's name (default: all)")
    parser.add_argument("--records", type=Path, metavar="FOLDER", help="keep the records here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparisons")
    args = parser.parse_args()
    if args.records:
        args.records.mkdir(parents=True, exist_ok=True)
    found = []
    for layout in LAYOUTS:
        if not args.names or any(name in layout.name for name in args.names):
            found += [compare(layout, record) for record in records(layout, args.records)]
            if args.json:
                rows = [asdict(one) | {"agrees": one.agrees} for one in found]
                save(args.json, {"date": date.today().isoformat(), "versions": versions(), "rows": rows})
    print(comparison_table(found))
    return 0 if all(one.agrees for one in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
