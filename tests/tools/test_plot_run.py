"""The command that draws finished runs."""

import json

from megatron_gspo.tools.plot_run import main


def test_two_runs_make_one_picture(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step, "reward/mean": step / 4}) for step in range(1, 5)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "both.png")]) == 0
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert "both.png" in capsys.readouterr().out


def test_a_directory_without_records_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("plot_run: ")
