"""The command line: versions alone, a config, two ranks, and a rank that is missing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from megatron_gspo.tools.doctor.__main__ import check
from tests.support.distributed import end_process, fork_server
from tests.support.ports import free_port

ROOT = Path(__file__).parents[3]
TP2 = "parallel.tensor_model_parallel_size=2"


def run_doctors(*calls: tuple[tuple[str, ...], dict[str, str]]) -> list[tuple[int, str]]:
    """(exit code, output) of the command for each pair of arguments and environment, all at once,
    in processes of their own.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(index) for index in range(len(calls))]
        processes = [
            fork_server().Process(target=_doctor, args=(file, *call))
            for file, call in zip(files, calls, strict=True)
        ]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(300)
        finally:
            for process in processes:
                end_process(process)
        return [tuple(json.loads(file.read_text())) for file in files]


def _doctor(file: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    os.setsid()
    os.environ.update(environment)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = check(list(arguments))
    file.write_text(json.dumps([code, output.getvalue()]))
    os._exit(0)  # as the command does: threads of groups with lost peers may never end


def launch(*arguments: tuple[str, ...], world: int = 2) -> list[tuple[int, str]]:
    """(exit code, output) of a rank for each of ``arguments``."""
    port = str(free_port())
    address = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return run_doctors(
        *(
            (given, {"RANK": str(rank), "LOCAL_RANK": str(rank), **address})
            for rank, given in enumerate(arguments)
        )
    )


def alone(*arguments: str) -> tuple[int, str]:
    [result] = run_doctors((arguments, {}))
    return result


def test_the_machine_alone() -> None:
    code, output = alone()
    *findings, _ = output.splitlines()
    assert code < 2
    themes = {line.split()[1].partition(".")[0] for line in findings}
    assert themes == {"versions", "known_issues"}


def test_a_broken_config_is_found_and_the_rest_is_looked_at(
    config_file: Callable[..., Path],
) -> None:
    code, output = alone(str(config_file()), TP2)
    lines = output.splitlines()
    assert code == 2 and lines[-2].startswith("error    config.check")
    assert "TP x PP x CP = 2 x 1 x 1 = 2 does not divide 1" in lines[-2]
    assert lines[-2].endswith(
        "or start the doctor with torchrun as the run, or pass --world-size N"
    )
    assert any(line.startswith("ok       model.weights") for line in lines)


def test_a_config_for_other_processes_and_one_that_is_none(
    config_file: Callable[..., Path], tmp_path: Path
) -> None:
    code, output = alone(str(config_file()), TP2, "--world-size", "4")
    assert code == 0 and "valid on 4 processes" in output
    (tmp_path / "wrong.yaml").write_text("trainng: {steps: 1}\n")
    code, output = alone(str(tmp_path / "wrong.yaml"))
    assert code == 2 and "did you mean training?" in output


def test_two_ranks(config_file: Callable[..., Path], tmp_path: Path) -> None:
    arguments = (str(config_file()), TP2)
    first, second = launch(arguments, arguments)
    assert first[0] < 2 and second == (first[0], "")
    by_check = {line.split()[1]: line for line in first[1].splitlines()}
    for name in (
        "groups.tp",
        "groups.world",
        "model.weights",
        "run.prompts",
        "ranks.all",
        "ranks.versions",
    ):
        assert by_check[name].startswith("ok "), name
    assert "1 group of 2 over gloo, exact" in by_check["groups.tp"]
    assert not (tmp_path / "run").exists()


def test_a_rank_with_another_config(config_file: Callable[..., Path]) -> None:
    file = str(config_file())
    first, second = launch((file, TP2), (file, TP2, "seed=8"))
    assert (first[0], second[0]) == (2, 2)
    assert "rank 1 loaded no config, or another than rank 0" in first[1]
    assert "skipped because of the ranks' errors" in first[1]


def test_a_rank_that_does_not_come() -> None:
    [(code, output)] = launch(("--timeout", "3"))
    assert code == 2 and "error    ranks.missing" in output
    assert "the 2 processes did not find each other in 0.05 minutes" in output
