"""What a local server is started with, and what its end says: command line, environment, ports, log.

sglang itself is never imported: the servers have an interpreter of their own.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import megatron_gspo
from megatron_gspo.errors import InputError, first_line

LOOPBACK = "127.0.0.1"
PORT_IN_USE = "its port is in use"  # in what `explain_end` says
# Below Linux' range for outgoing connections, which take ports at any moment
_PORTS = range(30_000, 32_768)
# What the options mean for the client too, so that they can't be passed by
_OURS = {"--port": "sglang.port", "--api-key": "sglang.api_key_file"}
# What torchrun tells its workers. A server is no worker: it would look for torchrun's store and wait for other ranks.
_TORCHRUN = re.compile(r"TORCHELASTIC_\w+|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)")
_OVERLAP_IS_RIGHT_ON_CPU = (0, 5, 23)  # before it, routed experts are overwritten while they're copied


@dataclass(frozen=True)
class ServerSettings:
    """Servers of one model on this machine.

    model: Hugging Face directory. python: interpreter that has sglang. base_port: server i listens on base_port + i;
    None: free ports. dtype: as sglang's `--dtype`. api_key: asked for by every server. arguments: passed to
    `sglang.launch_server` as they are, after ours, so that they win; `--host` tells where to listen if not on loopback,
    `--device cpu` to leave the GPUs alone (as where there is none), `--base-gpu-id` the first server's first GPU, from
    which on each takes as many as it needs. log_dir: `server_<i>.log`. start_timeout: seconds. max_restarts: of one
    server in a row.
    """

    model: str
    count: int = 1
    python: str = sys.executable
    base_port: int | None = None
    dtype: str = "auto"
    routed_experts: bool = False
    api_key: str | None = field(default=None, repr=False)
    arguments: tuple[str, ...] = ()
    log_dir: str = "."
    start_timeout: float = 600.0
    max_restarts: int = 3

    def __post_init__(self) -> None:
        for argument in self.arguments:
            if key := _OURS.get(argument.split("=", 1)[0]):
                raise InputError(f"sglang.server_args: {argument.split('=', 1)[0]} is ours to pass; set {key} instead")
        if self.api_key is not None and option(self.arguments, "--config"):
            raise InputError("sglang.server_args: --config can't be combined with an API key, which takes its place; "
                             "give its contents as arguments")  # fmt: skip
        if self.count < 1:
            raise InputError(f"sglang.num_servers={self.count}: must be at least 1")

    @property
    def host(self) -> str:
        """Where the servers listen; anything but loopback can be reached from other machines."""
        return option(self.arguments, "--host") or LOOPBACK


def option(arguments: Sequence[str], name: str) -> str | None:
    """The last value given to an option as `--name value` or `--name=value`; None where it isn't given."""
    found = None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if argument == name:
            found = following
        elif argument.startswith(f"{name}="):
            found = argument.split("=", 1)[1]
    return found


def gpus_of_a_server(arguments: Sequence[str]) -> int:
    """How many GPUs a server with these arguments takes."""
    sizes = [("--tp-size", "--tensor-parallel-size", "--tp"), ("--pp-size", "--pipeline-parallel-size", "--pp")]
    if "--enable-dp-attention" not in arguments:  # with it, the data-parallel ranks are among the tensor-parallel ones
        sizes.append(("--dp-size", "--data-parallel-size", "--dp"))
    count = 1
    for names in sizes:
        value = next((value for name in names if (value := option(arguments, name))), "1")
        if not value.isdecimal() or not int(value):
            raise InputError(f"sglang.server_args: {names[0]} {value}: must be a positive number")
        count *= int(value)
    return count


def on_cpu(settings: ServerSettings) -> bool:
    """Whether servers run without a GPU: as `--device` says, else where torch sees none."""
    if device := option(settings.arguments, "--device"):
        return device == "cpu"
    import torch

    return not torch.cuda.is_available()


def server_command(settings: ServerSettings, index: int, port: int, *, cpu: bool, version: tuple[int, ...],
                   config: str | None = None) -> list[str]:
    """The command of server `index`. version: sglang's, as numbers. config: file with what mustn't be seen in `ps`."""
    model = os.path.abspath(settings.model) if os.path.isdir(settings.model) else settings.model
    command = [settings.python, "-m", "sglang.launch_server", "--model-path", model]
    command += ["--host", settings.host, "--port", str(port), "--dtype", settings.dtype]
    command += ["--log-level-http", "warning"]  # else a line for each request
    if settings.routed_experts:
        command.append("--enable-return-routed-experts")
    if cpu:
        # Without a bound on tokens the cache takes most of the memory; without sleep a core spins while nothing runs.
        command += ["--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", "8192"]
        command += ["--sleep-on-idle", "--skip-server-warmup"]
        if version < _OVERLAP_IS_RIGHT_ON_CPU:
            command.append("--disable-overlap-schedule")
    if config:
        command += ["--config", config]
    command += settings.arguments
    if not cpu and settings.count > 1:
        first = int(option(settings.arguments, "--base-gpu-id") or 0)
        command += ["--base-gpu-id", str(first + index * gpus_of_a_server(settings.arguments))]
    return command


def server_environment(settings: ServerSettings, *, cpu: bool, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The trainer's environment without what torchrun told it and, for another interpreter, without Python's paths."""
    environment = {name: value for name, value in base.items() if not _TORCHRUN.fullmatch(name)}
    environment["PYTHONSAFEPATH"] = "1"  # `python -m` would look for packages in the working directory first
    if settings.python != sys.executable:
        environment = {name: value for name, value in environment.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    if cpu:
        paths = [patch_folder(), *filter(None, [environment.get("PYTHONPATH")])]
        environment.update(SGLANG_USE_CPU_ENGINE="1", OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(paths))
    return environment


def patch_folder() -> str:
    """Where the start-up hook for servers without a GPU lies, in a checkout or an installation."""
    for root in megatron_gspo.__path__:
        folder = Path(root) / "patches" / "sglang_on_cpu"
        if (folder / "sitecustomize.py").is_file():
            return str(folder.resolve())
    raise InputError("patches/sglang_on_cpu is missing from this installation of megatron-gspo: install it again")


def sglang_version(python: str) -> tuple[int, ...]:
    """The numbers of the sglang version that an interpreter has, such as (0, 5, 15) for 0.5.15.post1.

    Raises InputError where there's no such interpreter or no sglang.
    """
    program = "import importlib.metadata as m; print(m.version('sglang'))"
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"sglang.python={python}: {first_line(error)}; name an interpreter that has sglang") from error
    if done.returncode:
        raise InputError(f"sglang.python={python}: sglang isn't installed there; name an interpreter that has it")
    numbers = re.match(r"[\d.]*\d", done.stdout.strip())
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def check_model(model: str) -> None:
    """Raise InputError for a local path that holds no model; a name on the hub is sglang's to look up."""
    local = os.path.exists(model) or model.startswith(("/", ".", "~")) or model.count("/") > 1
    if local and not os.path.isfile(os.path.join(model, "config.json")):
        raise InputError(f"sglang: model path {model}: there's no config.json; name a Hugging Face model directory")


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def choose_ports(settings: ServerSettings, *, avoid: Sequence[int] = ()) -> list[int]:
    """A port for each server: base_port + i, which must be free, or free ones found from a random place on."""
    if settings.base_port is not None:
        ports = [settings.base_port + index for index in range(settings.count)]
        for port in ports:
            if not is_free(settings.host, port):
                raise InputError(f"sglang.port={settings.base_port}: port {port} is in use on {settings.host}; "
                                 "choose another or end what listens there")  # fmt: skip
        return ports
    start = random.SystemRandom().randrange(len(_PORTS))
    found: list[int] = []
    for offset in range(len(_PORTS)):
        port = _PORTS[(start + offset) % len(_PORTS)]
        if port not in avoid and is_free(settings.host, port):
            found.append(port)
            if len(found) == settings.count:
                return found
    raise InputError(f"sglang: no {settings.count} free ports in {_PORTS.start}..{_PORTS.stop - 1}; set sglang.port")


def write_secret(api_key: str) -> str:
    """A new file, readable by this user alone, from which `--config` takes the key; returns its path."""
    handle, path = tempfile.mkstemp(prefix="sglang-", suffix=".yaml")  # mode 0600
    with os.fdopen(handle, "w") as file:
        file.write(f"api-key: {json.dumps(api_key)}\n")
    return path


# (what the log says, what it means and what to do), from sglang 0.5.15 and 0.5.23; the first that is found
_CAUSES = (
    (r"address already in use|\[Errno 98\]", f"{PORT_IN_USE}; choose another sglang.port"),
    (
        r"unrecognized arguments|error: (argument|ambiguous option|the following arguments)",
        "sglang refused its arguments; correct sglang.server_args",
    ),
    (
        r"^(ModuleNotFoundError|\S+): No module named",
        "sglang isn't whole there; install it or name another interpreter in sglang.python",
    ),
    (
        r"out of memory|OutOfMemoryError|Not enough memory|MemoryError|can(no|')t allocate memory",
        "it ran out of memory; lower --mem-fraction-static or --max-total-tokens",
    ),
    (
        r"is not a local folder|does not appear to have a file|Unrecognized model in|Can't load.*config|"
        r"Error no file named|Cannot find any model weights|Repo id must be|SafetensorError",
        "its model can't be loaded; check the model path",
    ),
)


def explain_end(log: str, code: int | None) -> str:
    """One line: why a server ended, from what it wrote and its exit code (None: it doesn't answer), quoting the log."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for pattern, meaning in _CAUSES:
        for line in reversed(lines):
            if re.search(pattern, line, re.IGNORECASE):
                return f"{meaning} ({shorten(line)!r})"
    if code is None:
        ended = "it didn't answer within sglang.start_timeout"
    elif code in (137, -9):
        ended = "it was killed by SIGKILL, which is how Linux ends a process when memory runs out"
    elif code > 128 or code < 0:
        ended = f"it was ended by signal {code - 128 if code > 0 else -code}"
    else:
        ended = f"it exited with code {code}"
    return f"{ended}; its last words: {' | '.join(shorten(line) for line in lines[-3:]) or 'none'}"


def shorten(line: str, limit: int = 240) -> str:
    """A line of a log that fits into a message."""
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
