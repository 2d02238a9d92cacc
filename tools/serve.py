"""Start inference servers on this machine and keep them running until interrupted, for runs that
set their `urls`.

    megatron-gspo serve --model DIR [--engine vllm] [--servers N] [--port PORT] [--sglang.xyz value
    ...]

Prints the `sglang.urls=[...]` argument for the run's command. `--sglang.xyz value` (of vLLM
`--vllm.xyz value`) is passed to the servers as `--xyz value`. `--sglang.host 0.0.0.0` makes them
reachable from other machines; set `--api-key-file` then.

example: megatron-gspo serve --model DIR --servers 2 --port 31000 --sglang.mem-fraction-static 0.7
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_gspo.config import ServerConfig, SGLangConfig, VLLMConfig
from megatron_gspo.config.load import split_server_arguments
from megatron_gspo.errors import InputError, UserError, printable
from megatron_gspo.paths import path_argument, path_text_argument
from megatron_gspo.rollout.server_kinds import SERVER_KINDS
from megatron_gspo.servers.ports import LOOPBACK
from megatron_gspo.servers.server_launch import ServerLaunch
from megatron_gspo.servers.server_processes import LocalServers

_POLL_SECONDS = 1.0
_SECTIONS: dict[str, type[ServerConfig]] = {
    section.section: section for section in (SGLangConfig, VLLMConfig)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 interrupted; 1 a server can't be started or all have failed; 2 wrong
    arguments.
    """
    ours, theirs = split_server_arguments(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(ours)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        launch = _launch(options, theirs)
        with LocalServers(launch, max_restarts=options.max_restarts, log=_log) as servers:
            return _keep(servers, options.advertise)
    except UserError as error:
        _log(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-gspo serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", type=path_text_argument, required=True, help="Hugging Face directory"
    )
    parser.add_argument(
        "--engine", choices=SERVER_KINDS, default="sglang", help="kind of servers (default sglang)"
    )
    parser.add_argument("--servers", type=int, default=1, help="number of servers (default 1)")
    parser.add_argument(
        "--port", type=int, help="of the first server; the next ones follow (default: free ports)"
    )
    python = "interpreter that has the engine (default: this one)"
    parser.add_argument("--python", type=path_text_argument, default=sys.executable, help=python)
    parser.add_argument("--dtype", default="auto", help="as the servers' (default auto)")
    parser.add_argument(
        "--routed-experts", action="store_true", help="return the routes of a mixture of experts"
    )
    key = "file whose first line is the key that every request needs"
    parser.add_argument("--api-key-file", type=path_argument, help=key)
    logs = "gets server_<i>.log (default sglang_logs or vllm_logs)"
    parser.add_argument("--log-dir", type=path_text_argument, help=logs)
    parser.add_argument("--start-timeout", type=float, default=600.0, help="seconds (default 600)")
    parser.add_argument(
        "--max-restarts", type=int, default=3, help="of one server in a row (default 3)"
    )
    parser.add_argument(
        "--advertise", help="this machine's address in the printed URLs (default: its name)"
    )
    return parser


def _launch(options: argparse.Namespace, server_args: Mapping[str, Sequence[str]]) -> ServerLaunch:
    if options.api_key_file:
        _check_key_file(options.api_key_file)
    engine = options.engine
    if others := [name for name in server_args if name != engine]:
        raise InputError(
            f"--{others[0]}.*: the servers are {engine}'s; give --engine {others[0]}, or"
            f" --{engine}.*"
        )
    config = _SECTIONS[engine](
        num_servers=options.servers,
        python=options.python,
        port=options.port,
        server_args=tuple(server_args.get(engine, ())),
        start_timeout=options.start_timeout,
        api_key_file=str(options.api_key_file) if options.api_key_file else None,
    )
    log_dir = options.log_dir or f"{engine}_logs"
    return SERVER_KINDS[engine].launch(
        config, options.model, options.dtype, options.routed_experts, log_dir
    )


def _check_key_file(file: Path) -> None:
    try:
        first = file.read_text(encoding="utf-8").splitlines()[:1]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"--api-key-file {file}: cannot be read ({type(error).__name__})"
        ) from error
    if not first or not first[0].strip():
        raise InputError(f"--api-key-file {file}: its first line is empty; put the key there")


def _keep(servers: LocalServers, advertise: str | None) -> int:
    """Print the URLs and report changes until no server is left. Returns the exit code."""
    host = servers.launch.host
    is_private = host in (LOOPBACK, "localhost", "::1")
    if not is_private and servers.launch.config.api_key_file is None:
        _log(
            f"{host} is open to other machines without a key, and anyone who can send it weights"
            " can run code in it: give --api-key-file or keep the network closed"
        )
    urls = list(servers.urls)
    if host in ("0.0.0.0", "::"):
        name = advertise or socket.gethostname()
        urls = [f"http://{name}:{url.rsplit(':', 1)[1]}" for url in urls]
    print(f"{servers.launch.engine}.urls=[{','.join(urls)}]", flush=True)
    left = set(servers.urls)
    while left:
        time.sleep(_POLL_SECONDS)
        left -= set(servers.poll().given_up)
    _log("no server is left")
    return 1


def _log(line: str) -> None:
    print(printable(f"megatron-gspo serve: {line}"), file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
