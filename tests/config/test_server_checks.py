"""Every refusal of the section `sglang` names key, value and fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gspo.config import ConfigError, SGLangConfig
from megatron_gspo.config.server_checks import check_server_files
from tests.config.building import build, refused

URL = "sglang.urls=['http://127.0.0.1:30000']"
ON_SERVERS = ("rollout.engine=sglang", URL)
AHEAD = (*ON_SERVERS, "rollout.overlap=true")


ON_VLLM = ("rollout.engine=vllm", "vllm.urls=['http://a:1']")

REFUSED = {
    "vLLM without a server": (["rollout.engine=vllm"], "vllm.urls = []:", "set vllm.urls"),
    "servers of both engines": (
        [*ON_VLLM, "sglang.num_servers=1"],
        'sglang: describes servers, and rollout.engine = "vllm" has none of them',
        "set rollout.engine: sglang",
    ),
    "tensors to vLLM": (
        [*ON_VLLM, "vllm.weight_transport=tensor"],
        'vllm.weight_transport = "tensor"',
        "distributed, disk",
    ),
    "changes to vLLM": (
        [*ON_VLLM, "vllm.weight_changes_only=true"],
        "vllm.weight_changes_only = true:",
        "remove it",
    ),
    "a group with vLLM on shared GPUs": (
        [*ON_VLLM, "vllm.colocated=true"],
        'vllm.weight_transport = "distributed":',
        "set it to disk",
    ),
    "no server": (["rollout.engine=sglang"], "sglang.urls = []:", "set sglang.urls"),
    "both": (
        [*ON_SERVERS, "sglang.num_servers=2"],
        'sglang.urls = ["http://127.0.0.1:30000"]:',
        "one of them",
    ),
    "servers of another engine": (
        ["sglang.num_servers=1"],
        'sglang: describes servers, and rollout.engine = "embedded"',
        "set rollout.engine: sglang",
    ),
    "staleness of another engine": (
        ["rollout.max_staleness=1"],
        "rollout.max_staleness = 1:",
        "set rollout.engine: sglang",
    ),
    "overlap of another engine": (["rollout.overlap=true"], "rollout.overlap = true:", "remove"),
    "oversampling of another engine": (
        ["rollout.oversampling=2"],
        "rollout.oversampling = 2",
        "remove it",
    ),
    "no scheme": (
        ["rollout.engine=sglang", "sglang.urls=['127.0.0.1:30000']"],
        'sglang.urls = "127.0.0.1:30000":',
        "write http://host:port",
    ),
    "twice": (
        ["rollout.engine=sglang", "sglang.urls=['http://a:1', 'http://b:1', 'http://a:1/']"],
        'sglang.urls = "http://a:1/":',
        "list every server once",
    ),
    "python of others": (
        [*ON_SERVERS, "sglang.python=/bin/python"],
        'sglang.python = "/bin/python":',
        "remove it",
    ),
    "too high a port": (
        ["rollout.engine=sglang", "sglang.num_servers=3", "sglang.port=65534"],
        "sglang.port = 65534:",
        "lower it",
    ),
    "no port number": (
        ["rollout.engine=sglang", "sglang.num_servers=1", "sglang.port=70000"],
        "sglang.port = 70000",
        "65535",
    ),
    "no disk": (
        [*ON_SERVERS, "sglang.weight_dir=/tmp/w"],
        'sglang.weight_dir = "/tmp/w":',
        "set sglang.weight_transport: disk",
    ),
    "a group on shared GPUs": (
        [*ON_SERVERS, "sglang.colocated=true"],
        'sglang.weight_transport = "distributed":',
        "set it to ipc",
    ),
    "no such route": (
        [*ON_SERVERS, "sglang.weight_transport=pigeon"],
        'sglang.weight_transport = "pigeon"',
        "distributed",
    ),
    "overlap alone": (
        [*ON_SERVERS, "rollout.overlap=true"],
        "rollout.overlap = true",
        "max_staleness to 1 or more",
    ),
    "overlap on shared GPUs": (
        [*AHEAD, "rollout.max_staleness=1", "sglang.colocated=true"],
        "rollout.overlap = true:",
        "to false",
    ),
    "staleness alone": (
        [*ON_SERVERS, "rollout.max_staleness=1"],
        "rollout.max_staleness = 1:",
        "or rollout.oversampling above 1",
    ),
    "too many begun": (
        [*ON_SERVERS, "rollout.max_staleness=1", "rollout.oversampling=2.5"],
        "rollout.oversampling = 2.5:",
        "set it to 2 at most",
    ),
    "no time for a response": (
        [*ON_SERVERS, "sglang.request_timeout=900", "sglang.response_timeout=600"],
        "sglang.response_timeout = 600.0:",
        "raise it",
    ),
    "time for health": (
        [*ON_SERVERS, "sglang.health_timeout=1"],
        "sglang.health_timeout = 1.0:",
        "set it to 2 or more",
    ),
    "a typo": ([*ON_SERVERS, "sglang.retrys=1"], "sglang.retrys", "retries"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused(plain, case):
    overrides, *words = REFUSED[case]
    message = refused(plain, *overrides)
    for word in words:
        assert word in message


def test_a_password_in_a_url_is_not_shown(plain):
    message = refused(plain, "rollout.engine=sglang", "sglang.urls=['http://me:s3cret@a:1']")
    assert "s3cret" not in message
    assert 'sglang.urls = "a:1"' in message
    assert "api_key_file" in message


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["rollout.overlap=true", "rollout.max_staleness=1"],
        ["rollout.oversampling=1.5"],
        ["rollout.oversampling=2", "rollout.max_staleness=1"],
        ["rollout.oversampling=3", "rollout.max_staleness=2"],
        ["sglang.weight_transport=disk", "sglang.weight_dir=/tmp/w"],
        ["sglang.colocated=true", "sglang.weight_transport=ipc"],
    ],
)
def test_what_can_work_is_not(plain, overrides):
    assert build(plain, *ON_SERVERS, *overrides).rollout.engine == "sglang"


def test_servers_that_the_run_starts_have_our_receiver(plain):
    started = ("rollout.engine=sglang", "sglang.num_servers=1")
    assert build(plain, *started).sglang.uses_receiver
    assert not build(plain, *started, "sglang.weight_transport=disk").sglang.uses_receiver
    assert not build(
        plain, "rollout.engine=sglang", "sglang.urls=[http://a:1]"
    ).sglang.uses_receiver


@pytest.mark.parametrize("key", ["weight_changes_only", "weight_checksums"])
def test_keys_of_our_receiver(plain, key):
    started = ("rollout.engine=sglang", "sglang.num_servers=1", f"sglang.{key}=true")
    assert getattr(build(plain, *started).sglang, key)
    for others in (
        ("sglang.weight_transport=tensor",),
        ("sglang.num_servers=0", "sglang.urls=[http://a:1]"),
    ):
        with pytest.raises(
            ConfigError, match=f"sglang.{key} = true: needs the receiver of servers that"
        ):
            build(plain, *started, *others)


FILES = {
    "no python": ({"python": "/no/such/python"}, 'sglang.python = "/no/such/python": no such file'),
    "no key": (
        {"api_key_file": "/no/such/key"},
        'sglang.api_key_file = "/no/such/key": cannot be read',
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_not_there(case):
    values, words = FILES[case]
    with pytest.raises(ConfigError) as caught:
        check_server_files(SGLangConfig(**values))
    assert words in str(caught.value) and ";" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n", b"  \nkey\n", b"\xff\xfe"])
def test_a_key_file_without_a_key(tmp_path: Path, content: bytes):
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError, match="put the key on its first line"):
        check_server_files(SGLangConfig(api_key_file=str(tmp_path / "key")))


def test_a_key_file(tmp_path: Path):
    (tmp_path / "key").write_text("the key\nmore\n")
    check_server_files(SGLangConfig(api_key_file=str(tmp_path / "key")))
