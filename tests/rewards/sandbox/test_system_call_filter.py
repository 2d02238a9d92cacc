"""The filter is a BPF program for this machine; its effect is in test_attacks.py."""

import sys

import pytest

from megatron_gspo.rewards.sandbox.system_call_filter import system_call_filter


def test_a_program_of_whole_instructions():
    pytest.importorskip("pyseccomp")
    program = system_call_filter()
    assert len(program) % 8 == 0 and 64 < len(program) // 8 < 4096


def test_none_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    assert system_call_filter() is None
