"""Weights to an SGLang server: time and extra client memory of each transport, against one plain
request.

The plain way is one request to /update_weights_from_tensor with every tensor in it, as a client
without buckets sends it. Both move the weights of a random Qwen3-MoE from this process to the same
server, in turns; a turn is a whole update: pause, weights, flush of the prefix cache, version,
continue. Memory is how far this process's peak lies above what it held before, which includes the
weights themselves: the stream hands out tensors that are there anyway.

    make test-sglang                                 # makes .venv-sglang; then
    OMP_NUM_THREADS=1 python benchmarks/weight_sync.py --sglang-python .venv-sglang/bin/python
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import datetime
import math
import pickle
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.common import (
    RESULTS,
    Row,
    Seconds,
    Spread,
    by_turns,
    hardware,
    number,
    ratios,
    table,
    time_row,
    timed,
    versions,
)
from benchmarks.result_files import save

MEBI = 2**20
TRANSPORTS = ("disk", "tensor", "distributed", "ipc")
PLAIN = "one request with all"
SECONDS = 300.0  # limit of an update


def make_model(path: Path, mebibytes: int) -> dict[str, torch.Tensor]:
    """A random float32 Qwen3-MoE of about so many MiB, nearly all of it experts of 0.5 MiB a
    tensor.
    """
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from megatron_gspo.tools.make_tiny_model import character_tokenizer

    tokenizer = character_tokenizer()
    # 16 experts of 3 tensors; attention takes 6 MiB.
    layers = max(1, round(mebibytes / (16 * 3 * 0.5 + 6)))
    config = Qwen3MoeConfig(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=512,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_experts=16,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        **{"head_dim": 64},  # read by the model, not declared by the class
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    from safetensors.torch import load_file

    return {
        name: tensor.clone()
        for file in path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def status(key: str) -> int:
    """A size of this process in bytes: VmRSS, or VmHWM, its peak since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def forget_peak() -> int:
    """Give free memory back to the system, begin a new peak and return the size now."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


class Contest:
    """The updates that are compared; each call moves all weights. `memory`: MiB above the
    start, by contestant.
    """

    def __init__(
        self, url: str, weights: dict[str, torch.Tensor], folder: Path, bucket_bytes: int
    ) -> None:
        from megatron_gspo.config import ServerConfig
        from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
        from megatron_gspo.servers.http_client import EventLoop, ServerClient, open_session
        from megatron_gspo.weight_transport.weight_update import make_transport

        self.loop = EventLoop()
        self.session = self.loop.run(open_session())
        self.server = ServerClient(url, self.session)
        self.weights = weights
        self.bucket_bytes = bucket_bytes
        self.count = 0
        configs = {
            name: ServerConfig(weight_transport=name, weight_dir=str(folder)) for name in TRANSPORTS
        }
        self.transports = {name: make_transport(configs[name], SGLangAPI()) for name in TRANSPORTS}
        self.memory: dict[str, list[float]] = {name: [] for name in (*TRANSPORTS, PLAIN)}

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()
        self.loop.run(self.session.close())
        self.loop.close()

    def run(self, name: str) -> Seconds:
        """One update, timed; raises ``RuntimeError`` if the server didn't take it."""
        self.count += 1
        before = forget_peak()
        seconds = timed(self.plain if name == PLAIN else lambda: self.ours(name))
        self.memory[name].append((status("VmHWM") - before) / MEBI)
        return seconds

    def ours(self, name: str) -> None:
        from megatron_gspo.weight_transport.weight_update import ServerUpdate

        transport = self.transports[name]
        version = f"bench:{self.count}"
        update = ServerUpdate(self.loop, [self.server], transport, version=version, timeout=SECONDS)
        try:
            update.begin()
            while update.next_transfer() is not None:
                transport.begin(version, 0)
                transfer = transport.transfer(
                    self.loop,
                    update.pending,
                    self.weights.items(),
                    bucket_bytes=self.bucket_bytes,
                    timeout=SECONDS,
                )
                update.record([transfer])
            update.finish(num_sources=1)
        except BaseException:
            update.abandon()
            raise
        if update.failures:
            raise RuntimeError(f"{name}: {update.failures}")

    def plain(self) -> None:
        def post(path: str, body: dict[str, Any]) -> None:
            answer = self.loop.run(self.server.post(path, body, timeout=SECONDS))
            if isinstance(answer, dict) and answer.get("success") is False:
                raise RuntimeError(f"{path}: {answer}")

        post("/pause_generation", {"mode": "abort"})
        post("/begin_weight_update", {})
        payload = base64.b64encode(pickle.dumps(list(self.weights.items()))).decode()
        post(
            "/update_weights_from_tensor",
            {"serialized_named_tensors": [payload], "weight_version": f"bench:{self.count}"},
        )
        post("/end_weight_update", {})
        post("/continue_generation", {})


def measure(contest: Contest, repeats: int) -> dict[str, list[Seconds]]:
    """Every contestant once a turn, after a turn that isn't counted."""
    updates = {name: partial(contest.run, name) for name in (*TRANSPORTS, PLAIN)}
    for update in updates.values():
        update()
    contest.memory = {name: [] for name in updates}
    return by_turns(updates, repeats=repeats, seconds=math.inf)


def rows_of(contest: Contest, taken: dict[str, list[Seconds]]) -> list[Row]:
    """Time and extra memory of each transport and of the plain way."""
    rows = [
        time_row("weight_sync", f"{name}: one update", taken[name], taken[PLAIN], peer_name=PLAIN)
        for name in TRANSPORTS
    ]
    for name in TRANSPORTS:
        ours = contest.memory[name]
        peer = contest.memory[PLAIN]
        row = Row(
            "weight_sync",
            f"{name}: extra memory",
            PLAIN,
            "MiB",
            "lower",
            ratios(ours, peer),
            Spread.of(ours),
            Spread.of(peer),
        )
        rows.append(row)
    return rows


def speeds(weights: dict[str, torch.Tensor], taken: dict[str, list[Seconds]]) -> dict[str, Any]:
    """Of the model, and MB/s (10^6 bytes) of each contestant's median turn."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    rate = {
        name: total / 1e6 / Spread.of([s.wall for s in turns]).median
        for name, turns in taken.items()
    }
    return {"megabytes": total / 1e6, "tensors": len(weights), "megabytes_per_second": rate}


def run(args: argparse.Namespace, start: Callable[..., Any]) -> dict[str, Any]:
    """The whole result."""
    from megatron_gspo.config import SGLangConfig
    from megatron_gspo.rollout.sglang.sglang_launch import SGLangLaunch

    machine = hardware()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = make_model(folder / "model", args.mebibytes)
        config = SGLangConfig(
            num_servers=1, python=args.sglang_python, server_args=("--max-total-tokens", "1024")
        )
        with start(
            SGLangLaunch(config, str(folder / "model"), "float32", log_dir=str(folder))
        ) as servers:
            contest = Contest(
                servers.urls[0], weights, folder / "weights", args.bucket_mebibytes * MEBI
            )
            version = contest.loop.run(contest.server.get("/server_info", timeout=30.0))["version"]
            taken = measure(contest, args.repeats)
            contest.close()
    rows = rows_of(contest, taken)
    print(table(rows))
    return {
        "schema": 1,
        "date": datetime.date.today().isoformat(),
        "hardware": machine,
        "versions": versions() | {"sglang": version},
        "bucket_mebibytes": args.bucket_mebibytes,
        "rows": [asdict(row) for row in rows],
        **speeds(weights, taken),
    }


def main() -> int:
    from megatron_gspo.servers.server_processes import LocalServers

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sglang-python", required=True, help="interpreter of an environment with sglang"
    )
    parser.add_argument(
        "--mebibytes", type=int, default=200, help="of weights, about (default: %(default)s)"
    )
    parser.add_argument("--bucket-mebibytes", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="2 repeats of 60 MiB; not for figures to quote"
    )
    parser.add_argument("--json", type=Path, help=f"write the result there, e.g. in {RESULTS}")
    args = parser.parse_args()
    if args.quick:
        args.repeats = 2
        args.mebibytes = 60
    result = run(args, LocalServers)
    print(
        f"{result['megabytes']:.0f} MB in {result['tensors']} tensors, buckets of"
        f" {args.bucket_mebibytes} MiB; MB/s: "
        + ", ".join(
            f"{name} {number(rate)}" for name, rate in result["megabytes_per_second"].items()
        )
    )
    if args.json:
        save(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
