"""Checks of a rank on its own: a broken or missing config."""

from __future__ import annotations

from tests.support.doctor_processes import (
    TP2,
    doctor,
    faults,
    table,
)


def test_a_broken_config_is_found_and_the_rest_is_looked_at(config_file, tmp_path):
    file = config_file()
    [outcome] = doctor(tmp_path, str(file), TP2, "--probe")
    assert outcome.code == 2
    assert faults(outcome) == [("error", "config.check")]
    text = table(outcome)[-1][2]
    assert text.startswith("parallel.tensor_model_parallel_size = 2: TP x PP x CP = 2 x 1 x 1 = 2 does not divide 1")
    assert text.endswith("or start the doctor with torchrun as the run, or pass --world-size N")
    assert ("ok", "model.weights") in [row[:2] for row in table(outcome)]
    [outcome] = doctor(tmp_path, str(file), TP2, "--world-size", "4")
    assert outcome.code == 0 and "valid on 4 processes" in outcome.out
    assert "of its GPU by the plan" in outcome.out
    [outcome] = doctor(tmp_path, str(file), TP2, "lora.rank=8", "--world-size", "4")
    assert outcome.code == 0 and "of its GPU by the plan" in outcome.out


def test_a_config_that_is_none(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("trainng: {steps: 1}\n")
    [outcome] = doctor(tmp_path, str(file))
    assert outcome.code == 2 and faults(outcome) == [("error", "config.load")]
    assert "trainng" in outcome.out and "did you mean training?" in outcome.out
