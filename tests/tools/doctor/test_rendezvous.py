"""Ranks that do not arrive, and a port in use."""

from __future__ import annotations

import socket

from tests.support.doctor_processes import (
    doctor,
    faults,
    free_port,
)


def test_a_rank_that_never_arrives(tmp_path):
    [outcome] = doctor(tmp_path, "--timeout", "1", world=2, absent=[1])
    assert outcome.code == 2
    assert faults(outcome) == [("error", "ranks.missing")]
    assert "rank 1 of 2 did not arrive within 1 s" in outcome.out


def test_the_first_rank_never_arrives(tmp_path):
    [outcome] = doctor(tmp_path, "--timeout", "1", world=2, absent=[0])
    assert outcome.code == 2
    assert faults(outcome) == [("error", "ranks.missing")]
    assert "where the first rank should serve it, within 1 s" in outcome.out


def test_a_port_that_is_taken(tmp_path):
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        [outcome] = doctor(tmp_path, "--timeout", "1", world=2, port=port, absent=[1])
    assert outcome.code == 2 and faults(outcome) == [("error", "ports.master")]
    assert f"MASTER_PORT = {port} is in use on the first rank's host" in outcome.out
