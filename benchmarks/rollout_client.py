"""Our client against SGLang's own load generator: output tokens per second from the same server, in turns.

Both keep 32 requests in flight with the same prompts (ids, as `bench_serving --dataset-name random-ids` makes
them), as many tokens each, with log-probs and routed experts, not streamed; the prefix cache is flushed before each.
The server's model has no end token, so every response has full length. Ours is `ServerEngine.generate`: fleet, checks
of every answer, samples with routes, decoded texts; the peer's client throws answers away. The peer reports its own
throughput, without its start.

    make test-sglang                                 # makes .venv-sglang; then
    OMP_NUM_THREADS=1 python benchmarks/rollout_client.py --sglang-python .venv-sglang/bin/python
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.common import RESULTS, Row, Spread, hardware, number, ratios, say, table, versions
from benchmarks.result_files import save

TARGET = 0.90  # of the peer's tokens per second
LAYERS, EXPERTS, TOP = 2, 8, 2
SEED = 42  # of the peer's prompts, and ours


def make_model(path: Path) -> int:
    """A tiny random Qwen3-MoE without an end token, with a character tokenizer; returns the tokenizer's vocabulary.

    Tiny, so that the server answers fast and the client's share shows.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from megatron_gspo.tools.make_tiny_model import character_tokenizer

    torch.manual_seed(0)
    tokenizer = character_tokenizer()
    tokenizer.eos_token = None
    config = Qwen3MoeConfig(
        vocab_size=-(-len(tokenizer) // 8) * 8, hidden_size=64, intermediate_size=128, moe_intermediate_size=32,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, num_experts=EXPERTS,
        num_experts_per_tok=TOP, max_position_embeddings=2048, tie_word_embeddings=False, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
        **{"head_dim": 32},  # read by the model, not declared by the class
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return tokenizer.vocab_size


def make_prompts(args: argparse.Namespace, vocabulary: int) -> list[np.ndarray]:
    """[prompt_length] ids each: what the peer's `random-ids` draws from SEED (sglang.benchmark.datasets.random)."""
    draws = np.random.RandomState(SEED)
    for length in (args.prompt_length, args.response_length):
        draws.randint(length, length + 1, size=args.requests)  # it draws lengths first
    offsets = draws.randint(0, vocabulary, size=args.requests)
    places = np.arange(args.prompt_length)
    return [(offset + i + places) % vocabulary for i, offset in enumerate(offsets)]


class Ours:
    """An engine with one server. `run` gives tokens per second of one batch."""

    def __init__(self, url: str, model: Path, args: argparse.Namespace, vocabulary: int) -> None:
        from safetensors.torch import load_file
        from transformers import AutoTokenizer

        from megatron_gspo.config import SamplingParams, SGLangConfig
        from megatron_gspo.data.sample import Prompt
        from megatron_gspo.models import family_of, read_config
        from megatron_gspo.rollout.server_engine.rollout_client import RolloutClient
        from megatron_gspo.rollout.server_engine.server_api import ServedModel
        from megatron_gspo.rollout.server_engine.server_engine import ServerEngine
        from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
        from megatron_gspo.rollout.sglang.sglang_weight_endpoints import SGLangWeightEndpoints
        from megatron_gspo.weight_transport.weight_update import make_transport

        weights = load_file(model / "model.safetensors")
        tokenizer = AutoTokenizer.from_pretrained(model)
        served = ServedModel(family_of(read_config(model))[1], return_routes=True)  # no end token
        config = SGLangConfig(urls=(url,), weight_transport="tensor", max_concurrent_requests=args.concurrency)
        transport = make_transport(config, SGLangWeightEndpoints())
        client = RolloutClient(config.urls, config, served, tokenizer.decode, api=SGLangAPI(), log=say)
        self.engine = ServerEngine(config, client, transport, log=say)
        self.engine.update_weights(weights.items(), version=1)
        self.prompts = [Prompt(i, ids.astype(np.int64), "") for i, ids in enumerate(make_prompts(args, vocabulary))]
        self.sampling = SamplingParams(1, args.response_length)
        self.expected = args.requests * args.response_length

    def run(self) -> float:
        started = time.perf_counter()
        samples = self.engine.generate(self.prompts, self.sampling, seed=0)
        seconds = time.perf_counter() - started
        if (tokens := sum(sample.response_length for sample in samples)) != self.expected:
            raise RuntimeError(f"{tokens} tokens came back, not {self.expected}")
        return tokens / seconds


def run_peer(url: str, model: Path, args: argparse.Namespace, environment: dict[str, str], output: Path) -> float:
    """Tokens per second as `sglang.bench_serving` reports them."""
    output.unlink(missing_ok=True)
    host, port = url.removeprefix("http://").split(":")
    command = [
        args.sglang_python, "-m", "sglang.bench_serving", "--backend", "sglang", "--host", host, "--port", port,
        "--model", str(model), "--tokenizer", str(model), "--dataset-name", "random-ids", "--tokenize-prompt",
        "--random-input-len", str(args.prompt_length), "--random-output-len", str(args.response_length),
        "--random-range-ratio", "1.0", "--num-prompts", str(args.requests), "--max-concurrency", str(args.concurrency),
        "--seed", str(SEED), "--temperature", "1.0", "--disable-stream", "--return-logprob", "--return-routed-experts",
        "--disable-tqdm", "--output-file", str(output),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode or not output.is_file():
        raise RuntimeError(f"bench_serving failed: {done.stderr[-600:] or done.stdout[-600:]}")
    record: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
    if record["completed"] != args.requests or record["total_output_tokens"] != args.requests * args.response_length:
        raise RuntimeError(f"bench_serving completed {record['completed']}, {record['total_output_tokens']} tokens")
    return record["output_throughput"]


def flush(url: str) -> None:
    """Empty the server's prefix cache; it refuses while a request ends."""
    import urllib.error
    import urllib.request

    for _ in range(50):
        try:
            urllib.request.urlopen(urllib.request.Request(url + "/flush_cache", method="POST"), timeout=30)
            return
        except urllib.error.HTTPError:
            time.sleep(0.1)
    raise RuntimeError("the server's cache is never free to be flushed")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The whole result; a turn that isn't counted comes first."""
    from megatron_gspo.config import SGLangConfig
    from megatron_gspo.rollout.sglang.sglang_launch import SGLangLaunch, on_cpu, sglang_environment
    from megatron_gspo.servers.package_launch import package_version
    from megatron_gspo.servers.server_processes import LocalServers

    machine = hardware()
    rates: dict[str, list[float]] = {"ours": [], "peer": []}
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), Path(name) / "model"
        vocabulary = make_model(model)
        config = SGLangConfig(
            num_servers=1, python=args.sglang_python, server_args=("--max-total-tokens", "32768")
        )
        launch = SGLangLaunch(config, str(model), "float32", routed_experts=True, log_dir=name)
        environment = sglang_environment(launch.python, cpu=on_cpu(launch.args))
        found = ".".join(map(str, package_version(args.sglang_python, ("sglang",), "sglang")))
        with LocalServers(launch) as servers:
            url = servers.urls[0]
            ours = Ours(url, model, args, vocabulary)
            runs = {"ours": ours.run, "peer": lambda: run_peer(url, model, args, environment, folder / "peer.jsonl")}
            for turn in range(-1, args.repeats):
                for side in ("ours", "peer") if turn % 2 else ("peer", "ours"):
                    flush(url)
                    rate = runs[side]()
                    say(f"turn {turn} {side}: {number(rate)} tokens/s")
                    if turn >= 0:
                        rates[side].append(rate)
            ours.engine.close()
    row = Row("rollout_client", f"output tokens/s at concurrency {args.concurrency}", "sglang.bench_serving",
              "tokens/s", "higher", ratios(rates["ours"], rates["peer"]), Spread.of(rates["ours"]),
              Spread.of(rates["peer"]), target=TARGET)  # fmt: skip
    shape = {key: getattr(args, key) for key in ("concurrency", "requests", "prompt_length", "response_length")}
    print(table([row]))
    return {
        "schema": 1,
        "date": datetime.date.today().isoformat(),
        "hardware": machine,
        "versions": versions() | {"sglang": found},
        "rows": [row.to_json()],
        **shape,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang-python", required=True, help="interpreter of an environment with sglang")
    for name, default in {"concurrency": 32, "requests": 512, "prompt-length": 64, "response-length": 64,
                          "repeats": 5}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="2 repeats of 128 requests; not for figures to quote")
    parser.add_argument("--json", type=Path, help=f"write the result there, e.g. in {RESULTS}")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.requests = 2, 128
    result = measure(args)
    if args.json:
        save(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
