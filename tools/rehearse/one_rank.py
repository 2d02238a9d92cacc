"""Rehearse one rank in this process and write its record: ``python -m
megatron_gspo.tools.rehearse.one_rank``.

A process can play one rank only: torch looks for its GPU once.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_gspo.errors import UserError, report
from megatron_gspo.tools.rehearse.fake_device.library import import_torch_with_fake_device


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m megatron_gspo.tools.rehearse.one_rank", description=__doc__
    )
    made.add_argument("config", help="config file of the run")
    made.add_argument("overrides", nargs="*", metavar="key=value", help="changes of the config")
    made.add_argument("--rank", type=int, default=0)
    made.add_argument("--world", type=int, required=True, help="number of GPUs")
    made.add_argument(
        "--imbalance",
        type=float,
        default=1.0,
        help="tokens of the first expert rank, by its fair share",
    )
    made.add_argument("--layers", type=int, help="rehearse only so many layers")
    made.add_argument("--output", type=Path, required=True, help="the record, as JSON")
    return made


def run(args: argparse.Namespace) -> None:
    """Rehearse and write the record."""
    import_torch_with_fake_device()
    import torch

    torch.set_num_threads(1)
    from megatron_gspo.config import load_config
    from megatron_gspo.patches.megatron_on_cpu import import_megatron
    from megatron_gspo.tools.rehearse.fake_device.cuda_api import fake_cuda
    from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu
    from megatron_gspo.tools.rehearse.records import write_record

    with tempfile.TemporaryDirectory() as folder:
        overrides = list(args.overrides)
        if args.layers is not None:
            given = load_config(args.config, overrides).model.path
            overrides.append(f"model.path={shortened_model(given, args.layers, Path(folder))}")
        config = load_config(args.config, overrides)
        gpu = FakeGpu(
            expert_parallel=config.parallel.expert_model_parallel_size, imbalance=args.imbalance
        )
        with fake_cuda(gpu.host):
            import_megatron()
            from megatron_gspo.tools.rehearse.rehearse_rank import rehearse_rank

            write_record(rehearse_rank(config, args.rank, args.world, gpu), args.output)


def shortened_model(path: str, layers: int, folder: Path) -> Path:
    """A model directory with the config.json of another, and its first layers only; a list with an
    entry for each layer, such as ``layer_types``, is cut with them, and so are letters for each."""
    data: dict[str, Any] = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    keys = data["text_config"] if isinstance(data.get("text_config"), dict) else data
    for key, value in keys.items():
        has_entries = isinstance(value, list) or key == "hybrid_override_pattern"
        if has_entries and len(value) == keys["num_hidden_layers"]:
            keys[key] = value[:layers]
    keys["num_hidden_layers"] = layers
    if "max_window_layers" in keys:
        keys["max_window_layers"] = layers
    (folder / "config.json").write_text(json.dumps(data), encoding="utf-8")
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        run(args)
    except UserError as error:
        return report(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
