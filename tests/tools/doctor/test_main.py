"""The command line, alone and on several ranks: all healthy, one late, one dead, one hung."""

from __future__ import annotations

import pytest

from megatron_gspo.tools.doctor.__main__ import parse
from tests.support.doctor_processes import (
    doctor,
    faults,
    table,
)


def test_the_machine_alone(tmp_path):
    [outcome] = doctor(tmp_path)
    found = table(outcome)
    assert outcome.code == (1 if faults(outcome) else 0)
    assert not [row for row in found if row[0] == "error"]
    themes = {check.partition(".")[0] for _, check, _ in found}
    assert themes == {"versions", "known_issues", "machine", "disk", "ports"}


def test_arguments():
    options = parse(["a.yaml", "seed=3", "--json", "--sglang.tp-size", "2", "--timeout", "5"])
    assert (options.config, options.overrides) == ("a.yaml", ("seed=3", "--sglang.tp-size", "2"))
    assert options.as_json and options.seconds == 5.0 and not options.probe
    assert parse([]).config == ""
    for wrong in (["--jsn"], ["seed=3"], ["--timeout", "0"], ["--timeout", "nan"], ["--world-size", "0"]):
        with pytest.raises(SystemExit) as left:
            parse(wrong)
        assert left.value.code == 2
