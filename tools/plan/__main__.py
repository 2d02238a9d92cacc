"""Estimate memory and step time of each parallel layout of a model on a cluster, without a GPU.

    megatron-gspo plan --model DIR --gpus N --gpu NAME --response-length L
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_gspo.config import ConfigError, LoRAConfig
from megatron_gspo.config.lora_checks import check_targets
from megatron_gspo.errors import InputError, UserError, report
from megatron_gspo.models import ModelShape, family_of, read_config
from megatron_gspo.models.model_shape import language_config, read_json
from megatron_gspo.paths import path_text_argument
from megatron_gspo.tools.plan import plan_report
from megatron_gspo.tools.plan.assumptions import Assumptions, parse_assumptions
from megatron_gspo.tools.plan.basis import basis_of
from megatron_gspo.tools.plan.hardware import GPUS, find_gpu
from megatron_gspo.tools.plan.layout_search import Fixed, Plan, no_fit, search
from megatron_gspo.tools.plan.layouts import name_of, parse_layout
from megatron_gspo.tools.plan.memory import RECOMPUTE
from megatron_gspo.tools.plan.workload import ENGINES, Cluster, Workload, check_cluster, check_workload

_SHORT = {  # reasons, in a table
    "none of": "nothing fits", "an engine of": "engine too small", "at most": "mini-batch too small",
}  # fmt: skip
SCALE = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see --help")


def parser() -> argparse.ArgumentParser:
    """Every option with its default."""
    made = _Parser(
        prog="megatron-gspo plan",
        description="Estimate memory and step time of each parallel layout of a model on a cluster, without a GPU.",
        epilog="example: megatron-gspo plan --model examples/qwen3_moe/models/Qwen3-30B-A3B --gpus 8 --gpu h200 "
        "--response-length 8192 --colocated",
    )
    model = "Hugging Face model directory, or its config.json"
    made.add_argument("--model", type=path_text_argument, required=True, help=model)
    made.add_argument("--gpus", type=int, default=8, help="training GPUs (default: %(default)s)")
    made.add_argument("--gpu", default="h100", help=f"one of {', '.join(GPUS)} (default: %(default)s)")
    made.add_argument("--response-length", type=int, required=True, help="longest response in tokens")
    for name, default, about in (
        ("prompt-length", 1024, "longest prompt in tokens"),
        ("rollout-batch-size", 128, "prompts per rollout batch"),
        ("n-samples", 8, "responses per prompt"),
        ("global-batch-size", 256, "sequences per optimizer step"),
        ("engine-gpus", 0, "GPUs of the servers; 0 is as many as --gpus"),
        ("engine-tensor", 1, "GPUs per server"),
        ("lora-rank", 0, "rank of adapters, which are then all that is trained; 0: all weights are"),
        ("top", 10, "layouts to show"),
    ):
        made.add_argument(f"--{name}", type=int, default=default, help=f"{about} (default: %(default)s)")
    made.add_argument("--engine", choices=ENGINES, default="sglang", help="source of rollouts (default: %(default)s)")
    made.add_argument("--colocated", action="store_true", help="SGLang on the trainer's GPUs: --engine colocated")
    made.add_argument("--reference", action="store_true", help="a frozen reference policy, for a KL term")
    made.add_argument("--value-model", action="store_true", help="PPO's value model, of the policy's size")
    made.add_argument("--lora-targets", metavar="NAMES", help="linear layers with an adapter, as q_proj,v_proj "
                      "(default: all)")  # fmt: skip
    made.add_argument("--lora-experts", choices=("each", "shared"), default="each", help="see lora.experts")
    made.add_argument("--no-replay", action="store_true", help="no routing replay")
    made.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    made.add_argument("--implementation", choices=("transformer_engine", "torch"), default="transformer_engine",
                      help="layer modules (default: %(default)s)")  # fmt: skip
    made.add_argument("--assume", action="append", default=[], metavar="NAME=VALUE", help="change an assumption")
    made.add_argument("--layout", help="this layout only, such as 'TP4 EP8'")
    made.add_argument("--recompute", choices=RECOMPUTE, help="this mode only (default: the fastest that fits)")
    made.add_argument("--max-tokens", type=int, help="tokens of a micro-batch (default: 1 to 8 longest sequences)")
    made.add_argument("--scale", action="store_true", help=f"one table of {SCALE[0]} to {SCALE[-1]} GPUs instead")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def load_model(path: str) -> tuple[dict[str, Any], ModelShape]:
    """config.json of a directory, or a file, with its sizes. Raises ``InputError``."""
    place = Path(path)
    if not place.exists():
        raise InputError(f"--model {path}: no such file; give a Hugging Face model directory or its config.json")
    hf = language_config(read_json(place)) if place.is_file() else read_config(place)
    return hf, family_of(hf)[1]


def may_use_transformer_engine(shape: ModelShape) -> bool:
    """Whether all layers have a mixer that Transformer Engine's layers can be built for."""
    return set(shape.mixers) == {"attention"}


def adapters(args: argparse.Namespace, hf: dict[str, Any]) -> LoRAConfig | None:
    """The adapters that the options ask for, which a model with this config.json has."""
    if args.lora_rank < 1:
        return None
    if args.value_model:
        problem = "the plan has no times of a value model beside adapters"
        raise InputError(f"--lora-rank {args.lora_rank}: {problem}; leave out --value-model, or use rehearse")
    targets = None if args.lora_targets is None else tuple(args.lora_targets.split(","))
    lora = LoRAConfig(rank=args.lora_rank, targets=targets, experts=args.lora_experts)
    try:
        check_targets(lora, hf)
    except ConfigError as error:
        raise InputError(f"--lora-targets {args.lora_targets}: {error.problem}; {error.fix}") from None
    return lora


def inputs(args: argparse.Namespace) -> tuple[Workload, Cluster, Assumptions]:
    """Workload, cluster and assumptions of the options; does not read the model."""
    work = Workload(
        response_length=args.response_length, prompt_length=args.prompt_length,
        rollout_batch_size=args.rollout_batch_size, n_samples=args.n_samples, global_batch_size=args.global_batch_size,
        reference=args.reference, value_model=args.value_model, routes=not args.no_replay,
        dtype_bytes=2 if args.dtype == "bfloat16" else 4,
        implementation=args.implementation,
    )  # fmt: skip
    engine = "colocated" if args.colocated else args.engine
    cluster = Cluster(find_gpu(args.gpu), args.gpus, engine, args.engine_gpus or args.gpus, args.engine_tensor)
    return work, cluster, parse_assumptions(args.assume)


def fixed_choice(args: argparse.Namespace, hf: dict[str, Any], work: Workload) -> Fixed:
    """The choices that the options fix."""
    layout = None if args.layout is None else parse_layout(args.layout, hf, args.gpus)
    if args.max_tokens is not None and args.max_tokens < work.longest:
        raise InputError(
            f"--max-tokens {args.max_tokens}: a sequence may take {work.longest} tokens (--prompt-length + "
            f"--response-length); give at least {work.longest}"
        )
    return Fixed(layout, args.recompute, args.max_tokens)


def check_scale(args: argparse.Namespace) -> None:
    """``InputError`` if ``--scale`` is combined with an option that fixes a choice."""
    for name in ("layout", "recompute", "max_tokens"):
        if (value := getattr(args, name)) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{flag} {value}: --scale chooses the fastest at each size; leave one of them out")


def scale(hf: dict[str, Any], shape: ModelShape, work: Workload, cluster: Cluster, assume: Assumptions, own: int
          ) -> list[tuple[int, Plan | None, Cluster, str]]:
    """The fastest layout for each size of ``SCALE``, with the same rollout batch; None and the reason if none fits."""
    rows = []
    for gpus in SCALE:
        sized = dataclasses.replace(cluster, gpus=gpus, engine_gpus=own or gpus)
        try:
            check_cluster(sized)
            found = search(hf, shape, work, sized, assume)
            best, reason = (found.plans[0], "") if found.plans else (None, str(no_fit(found, work, sized, assume)))
        except InputError as error:
            best, reason = None, str(error)
        if best is None:
            reason = next((text for part, text in _SHORT.items() if part in reason), reason)
        rows.append((gpus, best, sized, reason))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a plan; 0, or 2 with one line on standard error."""
    try:
        args = parser().parse_args(arguments)
        hf, shape = load_model(args.model)
        work, cluster, assume = inputs(args)
        work = dataclasses.replace(work, lora=adapters(args, hf))
        if not may_use_transformer_engine(shape) or work.lora is not None:  # Transformer Engine's layers can't be built
            work = dataclasses.replace(work, implementation="torch")
        check_workload(work, shape.max_position_embeddings)
        basis = basis_of(shape, work)
        if args.scale:
            check_scale(args)
            rows = scale(hf, shape, work, cluster, assume, args.engine_gpus)
            if args.json:
                print(json.dumps([{"gpus": gpus, "reason": reason, "plan": plan and plan.to_json(sized, basis)}
                                  for gpus, plan, sized, reason in rows], indent=2))  # fmt: skip
            else:
                described = plan_report.describe(shape, work, cluster, sizes=False)
                print(described, plan_report.scale_table(rows), sep="\n\n")
            return 0
        check_cluster(cluster)
        found = search(hf, shape, work, cluster, assume, fixed_choice(args, hf, work))
        if not found.plans:
            raise no_fit(found, work, cluster, assume)
        if args.json:
            print(json.dumps({
                "plans": [plan.to_json(cluster, basis) for plan in found.plans[: max(args.top, 1)]],
                "considered": found.considered, "fit": len(found.plans), "refused": dict(found.refused),
                "assumptions": dataclasses.asdict(assume), "fastest": name_of(found.plans[0].parallel),
            }, indent=2))  # fmt: skip
        else:
            print(plan_report.whole_page(found, shape, work, cluster, assume, max(args.top, 1)))
    except UserError as error:
        return report(error)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
