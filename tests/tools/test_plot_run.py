"""The command that draws finished runs."""

import json

from megatron_gspo.tools.plot_run import main


def write_runs(folder, *names):
    for name in names:
        (folder / name).mkdir(parents=True)
        lines = [json.dumps({"step": step, "reward/mean": step / 4}) for step in range(1, 5)]
        (folder / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        (folder / name / "curves.png").write_bytes(b"of its own run")
    return [str(folder / name) for name in names]


def test_no_run_s_picture_is_replaced_by_that_of_others(tmp_path, capsys, monkeypatch):
    first, second = write_runs(tmp_path, "a", "b")
    monkeypatch.chdir(tmp_path)
    assert main([first, second]) == 0
    assert capsys.readouterr().out == "curves_a_b.png\n" and (tmp_path / "curves_a_b.png").is_file()
    for output in ("a/curves.png", "b/curves.png"):
        assert main([first, second, "--output", output]) == 2
        assert "is the picture of the run" in capsys.readouterr().err
    assert main([first, "--output", "b/curves.png"]) == 2
    monkeypatch.chdir(tmp_path / "a")
    assert main([".", second]) == 0 and main([first, second, "--output", "curves.png"]) == 2
    assert all(
        (tmp_path / name / "curves.png").read_bytes() == b"of its own run" for name in ("a", "b")
    )
    assert main([first]) == 0 and (tmp_path / "a" / "curves.png").read_bytes().startswith(
        b"\x89PNG"
    )


def test_metrics_of_another_program_are_one_line(tmp_path, capsys):
    (run,) = write_runs(tmp_path, "a")
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 1, "reward/mean": "high"}\n')
    assert main([run]) == 2
    problem = "reward/mean is no number; it is not of a run of this program"
    assert capsys.readouterr().err == f"plot_run: {run}/metrics.jsonl: {problem}\n"
