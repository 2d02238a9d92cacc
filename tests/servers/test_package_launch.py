"""What all launches of servers check. No server is started here."""

from __future__ import annotations

import sys

import pytest

from megatron_gspo.errors import InputError
from megatron_gspo.servers.package_launch import check_model, package_version, release


def test_an_interpreter_without_sglang_and_one_that_is_absent():
    with pytest.raises(InputError, match=r"sglang.python=.*sglang is not installed there"):
        package_version(sys.executable, ("sglang",), "sglang")
    with pytest.raises(InputError, match=r"sglang.python=/no/python: .*No such file"):
        package_version("/no/python", ("sglang",), "sglang")


def test_a_path_without_a_model_is_named_and_a_hub_name_is_left_to_sglang(tmp_path):
    with pytest.raises(InputError, match=f"model path {tmp_path}: no config.json there"):
        check_model(str(tmp_path), "sglang")
    with pytest.raises(InputError, match="model path /no/where"):
        check_model("/no/where", "sglang")
    check_model("Qwen/Qwen3-30B-A3B", "sglang")
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path), "sglang")


def test_the_numbers_of_a_version():
    assert [
        release(version) for version in ("0.5.15.post1", "0.5.23", "0.32.0rc1", "unknown", "")
    ] == [(0, 5, 15), (0, 5, 23), (0, 32, 0), (), ()]
