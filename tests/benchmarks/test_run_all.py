"""`run_all.py`: a benchmark's command, and what becomes of one that fails or hangs."""

from __future__ import annotations

import pytest

from benchmarks.run_all import command_of, run_benchmark


def test_commands_name_the_peers_interpreter_only_where_it_is_used() -> None:
    command = command_of("loop_vs_trl", quick=True, peers_python="/p")
    assert command == ["benchmarks/loop_vs_trl.py", "--quick", "--peers-python", "/p"]
    assert command_of("step_vs_megatron", quick=False, peers_python="/p") == [
        "benchmarks/step_vs_megatron.py"
    ]


def test_a_result_is_read_and_a_failure_told(tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys; open(sys.argv[2], 'w').write('{\"rows\": []}')")
    assert run_benchmark([str(program)]) == {"rows": []}
    program.write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="exit code 3"):
        run_benchmark([str(program)])
    program.write_text("import time; time.sleep(60)")
    with pytest.raises(RuntimeError, match="took longer than 1 s"):
        run_benchmark([str(program)], 1.0)
