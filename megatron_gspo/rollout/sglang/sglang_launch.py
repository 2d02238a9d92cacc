"""How an SGLang server is started on this node: command line, environment, reasons of its exit.

sglang itself is never imported: the servers have an interpreter of their own.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import megatron_gspo
from megatron_gspo.config import ServerConfig
from megatron_gspo.errors import InputError, first_line
from megatron_gspo.rollout.sglang.sglang_args import gpus_per_server
from megatron_gspo.servers.ports import LOOPBACK
from megatron_gspo.servers.server_args import option
from megatron_gspo.servers.server_launch import server_environment
from megatron_gspo.weight_transport.receiver_transport import RECEIVER, RECEIVER_FOLDER

# Options that the client needs too -> their config keys
_RESERVED = {"--port": "sglang.port", "--api-key": "sglang.api_key_file",
             "--custom-weight-loader": "sglang.weight_transport"}  # fmt: skip
_CPU_OVERLAP_VERSION = (0, 5, 23)  # earlier versions overwrite routed experts while they are copied
_FREEZE_SECONDS = 2.0  # timeout of /freeze_gc
# See `ServerLaunch.exit_causes`; from the logs of sglang 0.5.15 and 0.5.23
_EXIT_CAUSES = (
    (
        r"unrecognized arguments|error: (argument|ambiguous option|the following arguments)",
        "sglang refused its arguments; correct sglang.server_args",
    ),
    (
        r"^(ModuleNotFoundError|\S+): No module named",
        "its sglang is incomplete; install it or name another interpreter in sglang.python",
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


@dataclass(frozen=True)
class SGLangLaunch:
    """`ServerLaunch` of SGLang servers.

    config: number, interpreter, ports, API key and arguments. The arguments are passed to `sglang.launch_server` after
    ours, so they override them: `--host` to listen on another address than loopback, `--device cpu` to use no GPU.
    model: Hugging Face directory. dtype: sglang's `--dtype`. routed_experts: whether servers return them. log_dir:
    directory of `server_<i>.log`. first_gpu: the first server's first GPU, from which on the servers take consecutive
    ones; None: `--base-gpu-id`, or 0.

    Raises InputError for arguments that this class sets, and if no server is to be started.
    """

    config: ServerConfig
    model: str
    dtype: str = "auto"
    routed_experts: bool = False
    log_dir: str = "."
    first_gpu: int | None = None
    engine: ClassVar[str] = "sglang"
    exit_causes: ClassVar[tuple[tuple[str, str], ...]] = _EXIT_CAUSES

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

    @cached_property
    def cpu(self) -> bool:
        """Whether the servers run without a GPU."""
        return on_cpu(self.args)

    @cached_property
    def version(self) -> tuple[int, ...]:
        """The interpreter's version of sglang. Raises InputError; see `sglang_version`."""
        return sglang_version(self.python)

    def check(self) -> None:
        """See `ServerLaunch.check`."""
        check_model(self.model)
        _ = self.version

    def command(self, index: int, port: int, *, key_file: str | None) -> list[str]:
        """See `ServerLaunch.command`."""
        return server_command(self, index, port, cpu=self.cpu, version=self.version, config_file=key_file)

    def environment(self) -> dict[str, str]:
        """See `ServerLaunch.environment`."""
        return sglang_environment(self.python, cpu=self.cpu)

    def write_key(self, api_key: str) -> str:
        """See `ServerLaunch.write_key`: a file for `--config`."""
        handle, path = tempfile.mkstemp(prefix="sglang-", suffix=".yaml")  # mode 0600
        with os.fdopen(handle, "w") as file:
            file.write(f"api-key: {json.dumps(api_key)}\n")
        return path

    def after_start(self, url: str, api_key: str | None) -> None:
        """Exclude what the server has loaded from its garbage collections.

        SGLang does so itself after its warm-up, which servers on a CPU skip. Each flush of the cache, and so each
        weight update, runs a collection, which takes 0.4 s otherwise.
        """
        if self.cpu:
            _freeze_gc(url, api_key)


def on_cpu(args: Sequence[str]) -> bool:
    """Whether servers with these arguments run without a GPU: by `--device`, else if torch finds none."""
    if device := option(args, "--device"):
        return device == "cpu"
    import torch

    return not torch.cuda.is_available()


def server_command(launch: SGLangLaunch, index: int, port: int, *, cpu: bool, version: tuple[int, ...],
                   config_file: str | None = None) -> list[str]:  # fmt: skip
    """The command line of server `index`. version: of sglang. config_file: with the API key, which `ps` would show."""
    model = os.path.abspath(launch.model) if os.path.isdir(launch.model) else launch.model
    command = [launch.python, "-m", "sglang.launch_server", "--model-path", model]
    command += ["--host", launch.host, "--port", str(port), "--dtype", launch.dtype]
    command += ["--log-level-http", "warning"]  # the default logs a line per request
    command += ["--custom-weight-loader", RECEIVER]
    if launch.routed_experts:
        command.append("--enable-return-routed-experts")
    if cpu:
        # Without a limit on tokens the cache takes most of the memory; without sleep an idle server uses a core.
        command += ["--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", "8192"]
        command += ["--sleep-on-idle", "--skip-server-warmup"]
        if version < _CPU_OVERLAP_VERSION:
            command.append("--disable-overlap-schedule")
    elif launch.config.colocated:
        command.append("--enable-memory-saver")  # without it a server keeps its memory
    if config_file:
        command += ["--config", config_file]
    command += launch.args
    if not cpu:
        given = int(option(launch.args, "--base-gpu-id") or 0)
        first = given if launch.first_gpu is None else launch.first_gpu
        command += ["--base-gpu-id", str(first + index * gpus_per_server(launch.args))]
    return command


def sglang_environment(python: str, *, cpu: bool, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`server_environment`, with our receiver of weights and what servers without a GPU need."""
    environment = server_environment(python, base)
    paths = [str(RECEIVER_FOLDER), *filter(None, [environment.get("PYTHONPATH")])]
    if cpu:
        paths.insert(0, patch_folder())
        environment.update(SGLANG_USE_CPU_ENGINE="1", OMP_NUM_THREADS="1")
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}


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


def _freeze_gc(url: str, api_key: str | None) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=_FREEZE_SECONDS)
    try:
        connection.request("POST", "/freeze_gc", headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        pass  # later collections take longer
    finally:
        connection.close()
