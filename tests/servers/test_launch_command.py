"""What local servers are started with, and what is said about their end. No server is started here."""

from __future__ import annotations

import os
import socket
import stat
import sys

import pytest
import yaml

from megatron_gspo.errors import InputError
from megatron_gspo.servers.launch_command import (
    ServerSettings,
    check_model,
    choose_ports,
    explain_end,
    on_cpu,
    option,
    patch_folder,
    server_command,
    server_environment,
    sglang_version,
    write_secret,
)

NEW, OLD = (0, 5, 23), (0, 5, 15)


def command(*, cpu: bool = False, version: tuple[int, ...] = NEW, index: int = 0, **settings: object) -> list[str]:
    made = ServerSettings(**{"model": "hub/model", "python": "/env/python", **settings})
    return server_command(made, index, 31_000 + index, cpu=cpu, version=version)


def test_the_command_on_a_gpu():
    assert command(routed_experts=True) == [
        "/env/python", "-m", "sglang.launch_server", "--model-path", "hub/model", "--host", "127.0.0.1",
        "--port", "31000", "--dtype", "auto", "--log-level-http", "warning", "--enable-return-routed-experts",
    ]  # fmt: skip


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
    made = command(index=2, count=3, arguments=arguments)
    assert option(made, "--base-gpu-id") == first and made[-1] == first
    assert option(command(index=2, count=3, arguments=arguments, cpu=True), "--base-gpu-id") in (None, "3")
    with pytest.raises(InputError, match="--tp-size many: must be a positive number"):
        command(count=2, arguments=("--tp", "many"))


def test_a_cpu_gets_what_it_needs():
    needed = {"--device": "cpu", "--attention-backend": "torch_native", "--max-total-tokens": "8192"}
    for version in (NEW, OLD):
        made = command(cpu=True, version=version)
        assert {name: option(made, name) for name in needed} == needed
        assert "--sleep-on-idle" in made and "--skip-server-warmup" in made
        assert ("--disable-overlap-schedule" in made) == (version == OLD)


def test_passed_arguments_come_last_and_as_they_are():
    given = ("--dtype", "bfloat16", "--max-total-tokens=4096", '--json-model-override-args={"a": 1}', "--x", "")
    made = command(cpu=True, dtype="float32", arguments=given)
    assert tuple(made[-len(given) :]) == given
    assert option(made, "--dtype") == "bfloat16" and option(made, "--max-total-tokens") == "4096"


@pytest.mark.parametrize(
    "argument, key",
    [("--port", "port"), ("--port=1", "port"), ("--api-key", "api_key_file")],
)
def test_arguments_that_the_client_must_know_have_keys_of_their_own(argument, key):
    with pytest.raises(InputError, match=rf"{argument.split('=')[0]} is ours to pass; set sglang.{key} instead"):
        ServerSettings(model="m", arguments=(argument, "1"))
    with pytest.raises(InputError, match="--config can't be combined with an API key"):
        ServerSettings(model="m", api_key="k", arguments=("--config", "file.yaml"))


def test_the_key_is_in_no_representation_and_its_file_is_private():
    assert "k-secret" not in repr(ServerSettings(model="m", api_key="k-secret"))
    key = 'quo"te: \\ #x'
    path = write_secret(key)
    try:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with open(path) as file:
            assert yaml.safe_load(file) == {"api-key": key}
    finally:
        os.unlink(path)


def test_the_environment_of_a_worker_is_not_a_servers():
    base = {"PATH": "/bin", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "GROUP_RANK": "0", "MASTER_ADDR": "h",
            "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "ROLE_WORLD_SIZE": "8", "MY_RANK": "kept",
            "CUDA_VISIBLE_DEVICES": "0,1", "PYTHONPATH": "/trainer"}  # fmt: skip
    kept = {"PATH": "/bin", "MY_RANK": "kept", "CUDA_VISIBLE_DEVICES": "0,1", "PYTHONSAFEPATH": "1"}
    assert server_environment(ServerSettings(model="m", python="/other"), cpu=False, base=base) == kept
    own = ServerSettings(model="m", python=sys.executable)
    assert server_environment(own, cpu=False, base=base) == {**kept, "PYTHONPATH": "/trainer"}
    on = server_environment(own, cpu=True, base=base)
    assert on["PYTHONPATH"] == f"{patch_folder()}{os.pathsep}/trainer" and on["SGLANG_USE_CPU_ENGINE"] == "1"
    assert on["OMP_NUM_THREADS"] == "1"


def test_a_device_that_is_asked_for_decides():
    assert on_cpu(ServerSettings(model="m", arguments=("--device", "cpu")))
    assert not on_cpu(ServerSettings(model="m", arguments=("--device=npu",)))


def test_an_interpreter_without_sglang_and_one_that_is_absent():
    with pytest.raises(InputError, match=r"sglang.python=.*sglang isn't installed there"):
        sglang_version(sys.executable)
    with pytest.raises(InputError, match=r"sglang.python=/no/python: .*No such file"):
        sglang_version("/no/python")


def test_a_path_without_a_model_is_named_and_a_hub_name_is_left_to_sglang(tmp_path):
    with pytest.raises(InputError, match=f"model path {tmp_path}: there's no config.json"):
        check_model(str(tmp_path))
    with pytest.raises(InputError, match="model path /no/where"):
        check_model("/no/where")
    check_model("Qwen/Qwen3-30B-A3B")
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path))


def test_ports_are_those_asked_for_or_free_ones():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"sglang.port={port - 1}: port {port} is in use on 127.0.0.1"):
            choose_ports(ServerSettings(model="m", base_port=port - 1, count=2))
    first = choose_ports(ServerSettings(model="m", count=3))
    assert len(set(first)) == 3 and all(30_000 <= port < 32_768 for port in first)
    assert not set(first) & set(choose_ports(ServerSettings(model="m", count=3), avoid=first))


# Last lines of real logs, of versions 0.5.23 and 0.5.15.post1
@pytest.mark.parametrize(
    "log, code, said",
    [
        ("[Errno 98] error while attempting to bind on address ('127.0.0.1', 31101): address already in use\nbye", 1,
         "its port is in use; choose another sglang.port"),
        ("usage: launch_server.py [-h]\nlaunch_server.py: error: unrecognized arguments: --no-such 1", 2,
         "correct sglang.server_args ('launch_server.py: error: unrecognized arguments: --no-such 1')"),
        ("/env/bin/python: No module named sglang.launch_server", 1, "name another interpreter in sglang.python"),
        ("INFO (/v1/responses) disabled (ModuleNotFoundError: No module named 'openai_harmony')\nRuntimeError: odd", 1,
         "it exited with code 1; its last words: INFO"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.", 1,
         "it ran out of memory; lower --mem-fraction-static"),
        ("safetensors_rust.SafetensorError: Error while deserializing header", 1, "check the model path"),
        ("serving", 137, "it was killed by SIGKILL, which is how Linux ends a process when memory runs out"),
        ("serving", 134, "it was ended by signal 6; its last words: serving"),
        ("a\n\nb\nc\nd\n", 3, "it exited with code 3; its last words: b | c | d"),
        ("", 0, "it exited with code 0; its last words: none"),
        ("loading", None, "it didn't answer within sglang.start_timeout; its last words: loading"),
    ],
)  # fmt: skip
def test_the_end_of_a_server_is_explained_in_a_line(log, code, said):
    line = explain_end(log, code)
    assert said in line and "\n" not in line


def test_a_long_line_is_cut():
    assert len(explain_end("x" * 10_000, 1)) < 400
