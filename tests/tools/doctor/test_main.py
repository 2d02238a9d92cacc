"""The command line, alone and on several ranks: all of them well, one late, one dead, one that hangs."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from megatron_gspo.tools.doctor.__main__ import parse
from megatron_gspo.tools.doctor.diagnostics import LEVELS
from tests.support.doctor_processes import (
    Outcome,
    agree_and_hang,
    arrive_and_hang,
    arrive_and_leave,
    doctor,
    free_port,
    impatient,
)

TP2 = "parallel.tensor_model_parallel_size=2"


def table(outcome: Outcome) -> list[tuple[str, str, str]]:
    """(level, check, text) of every line but the summary; no traceback, no second report."""
    assert "Traceback" not in outcome.out + outcome.err, outcome.err
    *rows, summary = outcome.out.splitlines()
    assert ": " in summary and not summary.startswith(LEVELS)
    return [tuple(row.split(None, 2)) for row in rows]  # type: ignore[misc]


def faults(outcome: Outcome) -> list[tuple[str, str]]:
    return [(level, check) for level, check, _ in table(outcome) if level in ("warning", "error")]


def test_the_machine_alone(tmp_path):
    [outcome] = doctor(tmp_path)
    found = table(outcome)
    assert outcome.code == (1 if faults(outcome) else 0)
    assert not [row for row in found if row[0] == "error"]
    themes = {check.partition(".")[0] for _, check, _ in found}
    assert themes == {"versions", "defects", "machine", "disk", "ports"}


def test_a_config_on_two_ranks_with_the_engines_compared(config_file, tmp_path):
    file = config_file(model={"dtype": "float32"})
    first, second = doctor(tmp_path, str(file), TP2, "--json", "--probe", world=2)
    content = json.loads(first.out)
    assert (first.code, second.code) == (content["exit_code"], content["exit_code"]) == (0, 0), first.out
    assert second.out == ""
    by_check = {finding["check"]: finding for finding in content["findings"]}
    for check in ("groups.tp", "groups.world", "model.weights", "run.prompts", "disk.run_dir", "ranks.all"):
        assert by_check[check]["level"] == "ok", check
    assert "2 over gloo, exact" in by_check["groups.tp"]["what"]
    assert by_check["agreement.log_probs"]["level"] == "ok"
    assert "defects.expert_gradients" in by_check or "0.19" in by_check["versions.megatron-core"]["what"]
    assert not (tmp_path / "run").exists()


def test_a_broken_config_is_found_and_the_rest_is_looked_at(config_file, tmp_path):
    file = config_file()
    [outcome] = doctor(tmp_path, str(file), TP2, "--probe")
    assert outcome.code == 2
    assert faults(outcome) == [("error", "config.check")]
    text = table(outcome)[-1][2]
    assert text.startswith("parallel.tensor_model_parallel_size = 2: TP x PP x CP = 2 x 1 x 1 = 2 does not divide 1")
    assert text.endswith("or start the doctor with torchrun as the run, or say --world-size N")
    assert ("ok", "model.weights") in [row[:2] for row in table(outcome)]
    [outcome] = doctor(tmp_path, str(file), TP2, "--world-size", "4")
    assert outcome.code == 0 and "nothing contradicts itself on 4 processes" in outcome.out
    assert "of its GPU by the plan" in outcome.out


def test_a_config_that_is_none(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("trainng: {steps: 1}\n")
    [outcome] = doctor(tmp_path, str(file))
    assert outcome.code == 2 and faults(outcome) == [("error", "config.load")]
    assert "trainng" in outcome.out and "did you mean training?" in outcome.out


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


def test_ranks_that_are_lost_later(tmp_path):
    first, *_ = doctor(tmp_path, world=3, others={0: impatient, 1: arrive_and_leave, 2: arrive_and_hang})
    assert first.code == 2
    lost = [text for level, check, text in table(first) if (level, check) == ("error", "ranks.silent")]
    assert [text.split(";")[0] for text in lost] == ["ranks 1-2: said nothing more, the last that it began: nothing"]


def test_a_rank_that_hangs_within_an_exchange(tmp_path):
    first, _ = doctor(tmp_path, world=2, others={0: impatient, 1: agree_and_hang})
    assert first.code == 2
    assert faults(first) == [("error", "ranks.silent"), ("error", "groups.late")]
    late = table(first)[-1][2]
    assert late.startswith("rank 0: not done after 1 s, in groups; a run would hang there as well")


def test_a_port_that_is_taken(tmp_path):
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        [outcome] = doctor(tmp_path, "--timeout", "1", world=2, port=port, absent=[1])
    assert outcome.code == 2 and faults(outcome) == [("error", "ports.master")]
    assert f"MASTER_PORT = {port} is in use on the first rank's host" in outcome.out


def test_a_rank_with_another_config(config_file, tmp_path):
    file = config_file()
    other = Path(tmp_path / "other.yaml")
    other.write_text(file.read_text().replace("seed: 7", "seed: 8"))
    first, second = doctor(tmp_path, str(file), TP2, world=2, own_arguments={1: (str(other), TP2)})
    assert (first.code, second.code) == (2, 2)
    assert faults(first) == [("error", "config.ranks")]
    assert "rank 1 read another config than rank 0" in first.out


def test_arguments():
    options = parse(["a.yaml", "seed=3", "--json", "--sglang.tp-size", "2", "--timeout", "5"])
    assert (options.config, options.overrides) == ("a.yaml", ("seed=3", "--sglang.tp-size", "2"))
    assert options.as_json and options.seconds == 5.0 and not options.probe
    assert parse([]).config == ""
    for wrong in (["--jsn"], ["seed=3"], ["--timeout", "0"], ["--timeout", "nan"], ["--world-size", "0"]):
        with pytest.raises(SystemExit) as left:
            parse(wrong)
        assert left.value.code == 2
