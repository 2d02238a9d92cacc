"""What servers on this node are started with. No server is started here."""

from __future__ import annotations

import os
import stat
import sys

import pytest
import yaml

from megatron_gspo.config import ServerConfig
from megatron_gspo.errors import InputError
from megatron_gspo.rollout.sglang.sglang_launch import (
    SGLangLaunch,
    patch_folder,
)
from megatron_gspo.servers import http_client
from megatron_gspo.servers.server_launch import option
from megatron_gspo.weight_transport.receiver_transport import RECEIVER_FOLDER

NEW = (0, 5, 23)
OLD = (0, 5, 15)


def launch(
    *,
    count: int = 1,
    args: tuple[str, ...] = (),
    api_key_file: str | None = None,
    **settings: object,
) -> SGLangLaunch:
    config = ServerConfig(
        num_servers=count, python="/env/python", server_args=args, api_key_file=api_key_file
    )
    return SGLangLaunch(config, **{"model": "hub/model", **settings})


def command(
    *, cpu: bool = False, version: tuple[int, ...] = NEW, index: int = 0, **settings: object
) -> list[str]:
    servers = on_device(launch(**settings), cpu=cpu, version=version)
    return servers.command(index, 31_000 + index, key_file=None)


def on_device(servers: SGLangLaunch, *, cpu: bool, version: tuple[int, ...] = NEW) -> SGLangLaunch:
    """The servers, with what they would find out about this machine and the interpreter."""
    vars(servers).update(cpu=cpu, version=version)
    return servers


def test_the_command_on_a_gpu():
    assert command(routed_experts=True) == [
        "/env/python",
        "-m",
        "sglang.launch_server",
        "--model-path",
        "hub/model",
        "--host",
        "127.0.0.1",
        "--port",
        "31000",
        "--dtype",
        "auto",
        "--log-level-http",
        "warning",
        "--custom-weight-loader",
        "megatron_gspo_receiver.load",
        "--enable-return-routed-experts",
        "--base-gpu-id",
        "0",
    ]


def test_servers_on_the_trainers_gpus_can_release_their_memory():
    config = ServerConfig(num_servers=1, python="/env/python", colocated=True)
    for cpu, expected in ((False, 1), (True, 0)):
        servers = on_device(SGLangLaunch(config, "hub/model"), cpu=cpu)
        made = servers.command(0, 31_000, key_file=None)
        assert made.count("--enable-memory-saver") == expected


@pytest.mark.parametrize(
    "arguments, first",
    [
        ((), "2"),
        (("--tp", "4"), "8"),
        (("--tensor-parallel-size=4", "--base-gpu-id", "3"), "11"),
        (("--tp-size", "2", "--dp-size", "2", "--pp", "2"), "16"),
        (("--tp-size", "4", "--dp-size", "4", "--enable-dp-attention"), "8"),
    ],
)
def test_the_third_server_begins_at_the_gpu_after_the_second(arguments, first):
    made = command(index=2, count=3, args=arguments)
    assert option(made, "--base-gpu-id") == first and made[-1] == first
    assert option(command(index=2, count=3, args=arguments, cpu=True), "--base-gpu-id") in (
        None,
        "3",
    )
    with pytest.raises(InputError, match="--tp-size many: must be a positive number"):
        command(count=2, args=("--tp", "many"))


def test_a_cpu_gets_what_it_needs():
    needed = {
        "--device": "cpu",
        "--attention-backend": "torch_native",
        "--max-total-tokens": "8192",
    }
    for version in (NEW, OLD):
        made = command(cpu=True, version=version)
        assert {name: option(made, name) for name in needed} == needed
        assert "--sleep-on-idle" in made and "--skip-server-warmup" in made
        assert ("--disable-overlap-schedule" in made) == (version == OLD)


def test_passed_arguments_come_last_and_as_they_are():
    given = (
        "--dtype",
        "bfloat16",
        "--max-total-tokens=4096",
        '--json-model-override-args={"a": 1}',
        "--x",
        "",
    )
    made = command(cpu=True, dtype="float32", args=given)
    assert tuple(made[-len(given) :]) == given
    assert option(made, "--dtype") == "bfloat16" and option(made, "--max-total-tokens") == "4096"


@pytest.mark.parametrize(
    "argument, key",
    [
        ("--port", "sglang.port"),
        ("--port=1", "sglang.port"),
        ("--api-key", "sglang.api_key_file"),
        ("--custom-weight-loader", "sglang.weight_transport"),
        ("--preferred-sampling-params", "rollout.temperature"),
    ],
)
def test_arguments_that_the_client_must_know_have_keys_of_their_own(argument, key):
    with pytest.raises(
        InputError, match=rf"{argument.split('=')[0]} is reserved; set {key} instead"
    ):
        launch(args=(argument, "1"))
    with pytest.raises(InputError, match="--config can't be combined with an API key"):
        launch(api_key_file="key", args=("--config", "file.yaml"))


def test_the_file_of_the_key_is_private():
    key = 'quo"te: \\ #x'
    path = launch().write_key(key)
    try:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with open(path) as file:
            assert yaml.safe_load(file) == {"api-key": key}
    finally:
        os.unlink(path)


def environment(python: str, *, cpu: bool) -> dict[str, str]:
    config = ServerConfig(num_servers=1, python=python)
    return on_device(SGLangLaunch(config, "hub/model"), cpu=cpu).environment(0)


def test_servers_without_a_gpu_get_the_start_up_hook(monkeypatch):
    for name in os.environ:
        monkeypatch.delenv(name)
    for name, value in {"PATH": "/bin", "RANK": "3", "PYTHONPATH": "/trainer"}.items():
        monkeypatch.setenv(name, value)
    on_a_gpu = environment(sys.executable, cpu=False)
    receiver = str(RECEIVER_FOLDER)
    joined = os.pathsep.join
    assert int(on_a_gpu.pop("SGLANG_TIMEOUT_KEEP_ALIVE")) > http_client._IDLE_SECONDS + 30
    assert on_a_gpu == {
        "PATH": "/bin",
        "PYTHONPATH": joined([receiver, "/trainer"]),
        "PYTHONSAFEPATH": "1",
    }
    on = environment(sys.executable, cpu=True)
    assert on["PYTHONPATH"] == joined([patch_folder(), receiver, "/trainer"])
    assert on["SGLANG_USE_CPU_ENGINE"] == "1"
    assert on["OMP_NUM_THREADS"] == "1"
    assert environment("/other", cpu=True)["PYTHONPATH"] == joined(
        [patch_folder(), receiver],
    )
