"""How an SGLang server is started on this node: command line, environment, ports.

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
from dataclasses import dataclass
from pathlib import Path

import megatron_gspo
from megatron_gspo.config import ServerConfig
from megatron_gspo.errors import InputError, first_line
from megatron_gspo.servers.server_args import gpus_per_server, option

LOOPBACK = "127.0.0.1"
# Below Linux' range of ports for outgoing connections
_PORTS = range(30_000, 32_768)
# Options that the client needs too -> their config keys
_RESERVED = {"--port": "sglang.port", "--api-key": "sglang.api_key_file"}
# torchrun's environment of its workers. With it a server would connect to torchrun's store and wait for other ranks.
_TORCHRUN = re.compile(r"TORCHELASTIC_\w+|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)")
_CPU_OVERLAP_VERSION = (0, 5, 23)  # earlier versions overwrite routed experts while they are copied


@dataclass(frozen=True)
class ServerLaunch:
    """What the servers on this node are started with.

    config: number, interpreter, ports, API key and arguments. The arguments are passed to `sglang.launch_server` after
    ours, so they override them: `--host` to listen on another address than loopback, `--device cpu` to use no GPU.
    model: Hugging Face directory. dtype: sglang's `--dtype`. routed_experts: whether servers return them. log_dir:
    directory of `server_<i>.log`. first_gpu: the first server's first GPU, from which on the
    servers take consecutive ones; None: `--base-gpu-id`, or 0.

    Raises InputError for arguments that this class sets, and if no server is to be started.
    """

    config: ServerConfig
    model: str
    dtype: str = "auto"
    routed_experts: bool = False
    log_dir: str = "."
    first_gpu: int | None = None

    def __post_init__(self) -> None:
        for argument in self.args:
            if key := _RESERVED.get(argument.split("=", 1)[0]):
                raise InputError(f"sglang.server_args: {argument.split('=', 1)[0]} is reserved; set {key} instead")
        if self.config.api_key_file is not None and option(self.args, "--config"):
            raise InputError("sglang.server_args: --config can't be combined with an API key, which is passed by it; "
                             "give its contents as arguments")  # fmt: skip
        if self.config.num_servers < 1:
            raise InputError(f"sglang.num_servers={self.config.num_servers}: must be at least 1")

    @property
    def args(self) -> tuple[str, ...]:
        """The arguments of the config."""
        return tuple(self.config.server_args)

    @property
    def python(self) -> str:
        """The interpreter that has sglang, as an absolute path."""
        return os.path.abspath(self.config.python) if self.config.python else sys.executable

    @property
    def host(self) -> str:
        """Where the servers listen. Any address but loopback can be reached from other machines."""
        return option(self.args, "--host") or LOOPBACK


def read_api_key(config: ServerConfig) -> str | None:
    """The API key of the servers, from the first line of its file; None without a file."""
    if config.api_key_file is None:
        return None
    return Path(config.api_key_file).read_text(encoding="utf-8").splitlines()[0].strip()


def on_cpu(args: Sequence[str]) -> bool:
    """Whether servers with these arguments run without a GPU: by `--device`, else if torch finds none."""
    if device := option(args, "--device"):
        return device == "cpu"
    import torch

    return not torch.cuda.is_available()


def server_command(launch: ServerLaunch, index: int, port: int, *, cpu: bool, version: tuple[int, ...],
                   config_file: str | None = None) -> list[str]:  # fmt: skip
    """The command line of server `index`. version: of sglang. config_file: with the API key, which `ps` would show."""
    model = os.path.abspath(launch.model) if os.path.isdir(launch.model) else launch.model
    command = [launch.python, "-m", "sglang.launch_server", "--model-path", model]
    command += ["--host", launch.host, "--port", str(port), "--dtype", launch.dtype]
    command += ["--log-level-http", "warning"]  # the default logs a line per request
    if launch.routed_experts:
        command.append("--enable-return-routed-experts")
    if cpu:
        # Without a limit on tokens the cache takes most of the memory; without sleep an idle server uses a core.
        command += ["--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", "8192"]
        command += ["--sleep-on-idle", "--skip-server-warmup"]
        if version < _CPU_OVERLAP_VERSION:
            command.append("--disable-overlap-schedule")
    if config_file:
        command += ["--config", config_file]
    command += launch.args
    if not cpu:
        given = int(option(launch.args, "--base-gpu-id") or 0)
        first = given if launch.first_gpu is None else launch.first_gpu
        command += ["--base-gpu-id", str(first + index * gpus_per_server(launch.args))]
    return command


def server_environment(python: str, *, cpu: bool, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The trainer's environment without torchrun's variables and, for another interpreter, without Python's paths."""
    environment = {name: value for name, value in base.items() if not _TORCHRUN.fullmatch(name)}
    environment["PYTHONSAFEPATH"] = "1"  # `python -m` would search the working directory first
    if python != sys.executable:
        environment = {name: value for name, value in environment.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    if cpu:
        paths = [patch_folder(), *filter(None, [environment.get("PYTHONPATH")])]
        environment.update(SGLANG_USE_CPU_ENGINE="1", OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(paths))
    return environment


def patch_folder() -> str:
    """Directory of the start-up hook for servers without a GPU, in a checkout or an installation."""
    for root in megatron_gspo.__path__:
        folder = Path(root) / "patches" / "sglang_on_cpu"
        if (folder / "sitecustomize.py").is_file():
            return str(folder.resolve())
    raise InputError("patches/sglang_on_cpu is missing from this installation of megatron-gspo: install it again")


def sglang_version(python: str) -> tuple[int, ...]:
    """The version of an interpreter's sglang, such as (0, 5, 15) for 0.5.15.post1.

    Raises InputError if there is no such interpreter or it has no sglang.
    """
    program = "import importlib.metadata as m; print(m.version('sglang'))"
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"sglang.python={python}: {first_line(error)}; name an interpreter that has sglang") from error
    if done.returncode:
        raise InputError(f"sglang.python={python}: sglang is not installed there; name an interpreter that has it")
    numbers = re.match(r"[\d.]*\d", done.stdout.strip())
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def check_model(model: str) -> None:
    """Raise InputError for a local path without a model. A name on the Hugging Face hub is left to sglang."""
    local = os.path.exists(model) or model.startswith(("/", ".", "~")) or model.count("/") > 1
    if local and not os.path.isfile(os.path.join(model, "config.json")):
        raise InputError(f"sglang: model path {model}: no config.json there; name a Hugging Face model directory")


def is_free(host: str, port: int) -> bool:
    """Whether a server can listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True


def choose_ports(config: ServerConfig, host: str, *, count: int | None = None, avoid: Sequence[int] = ()) -> list[int]:
    """A port for each server: config.port + i, which must be free, or free ones, searched from a random port on.

    count: servers, None: config.num_servers. Raises InputError.
    """
    count = config.num_servers if count is None else count
    if config.port is not None:
        ports = [config.port + index for index in range(count)]
        for port in ports:
            if not is_free(host, port):
                raise InputError(f"sglang.port={config.port}: port {port} is in use on {host}; "
                                 "choose another or end the process that listens there")  # fmt: skip
        return ports
    start = random.SystemRandom().randrange(len(_PORTS))
    found: list[int] = []
    for offset in range(len(_PORTS)):
        port = _PORTS[(start + offset) % len(_PORTS)]
        if port not in avoid and is_free(host, port):
            found.append(port)
            if len(found) == count:
                return found
    raise InputError(f"sglang: no {count} free ports in {_PORTS.start}..{_PORTS.stop - 1}; set sglang.port")


def write_secret(api_key: str) -> str:
    """Write the key to a new file for `--config`, readable by this user alone; returns its path."""
    handle, path = tempfile.mkstemp(prefix="sglang-", suffix=".yaml")  # mode 0600
    with os.fdopen(handle, "w") as file:
        file.write(f"api-key: {json.dumps(api_key)}\n")
    return path
