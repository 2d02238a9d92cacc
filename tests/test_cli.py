"""The console command: its list and its dispatch."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron_gspo import __version__, cli


def test_help_lists_every_command_in_a_line(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.summary)}$", shown, re.MULTILINE)
    assert cli.main([]) == 0 and capsys.readouterr().out == shown
    assert max(map(len, shown.splitlines())) <= 120


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"megatron-gspo {__version__}\n"


def test_an_unknown_command_is_one_line_that_names_the_known_ones(capsys):
    assert cli.main(["trian", "x.yaml"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert shown.err.startswith("megatron-gspo: 'trian' is not a command; use one of train, demo")


def test_arguments_and_exit_code_are_passed_through(monkeypatch):
    given = []

    def main(arguments: list[str]) -> int:
        given.append(arguments)
        return 3

    monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(main=main))
    assert cli.main(["plan", "--model", "x"]) == 3
    assert given == [["--model", "x"]]


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from megatron_gspo.cli import main; main(['--help'])\nassert not {'torch',"
        " 'transformers', 'pydantic', 'megatron.core', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("arguments", [["--help"], ["to-megatron", "--tp", "0"], ["unknown"]])
def test_convert_parses_its_arguments_before_it_loads_torch(arguments):
    code = (
        "import sys\nfrom megatron_gspo.tools.convert.__main__ import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'megatron.core', 'pydantic', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupted(module: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    assert cli.main(["plan", "--help"]) == 130
    assert capsys.readouterr().err == "megatron-gspo plan: interrupted\n"
