"""Old code beside new, in a small repository: which commit is the old code, where it runs, in what order."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks import confirm_losses
from benchmarks.confirm_losses import checkout, in_turns, revision_of, run_from

RUN_ALL = """
import argparse, json, pathlib, which
parser = argparse.ArgumentParser()
parser.add_argument("--only", nargs="+")
parser.add_argument("--results", type=pathlib.Path)
parser.add_argument("--peers-python")
args = parser.parse_args()
args.results.mkdir(parents=True)
found = {"code": which.CODE, "only": args.only, "peers": args.peers_python}
(args.results / "partial.json").write_text(json.dumps(found))
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Two commits: which.CODE is "old" in the first, which also has the result, and "new" in the second."""
    identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for name, value in identity.items():
        monkeypatch.setenv(name, value)
    root = tmp_path / "repository"
    (root / "benchmarks").mkdir(parents=True)
    (root / "benchmarks" / "run_all.py").write_text(RUN_ALL)
    (root / "result.json").write_text("{}")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    for code in ("old", "new"):
        (root / "which.py").write_text(f"CODE = {code!r}\n")
        subprocess.run("git add -A && git commit -qm step", shell=True, cwd=root, check=True)
    monkeypatch.setattr(confirm_losses, "ROOT", root)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return root


def test_the_old_code_is_that_of_the_results_commit(repository, tmp_path):
    revision = revision_of(repository / "result.json")
    with checkout(revision, tmp_path / "base") as old:
        results = [run_from(root, ["a", "b"], "peers") for root in (old, repository)]
    assert results == [{"code": code, "only": ["a", "b"], "peers": "peers"} for code in ("old", "new")]
    assert not old.exists()


def test_a_checkout_that_a_killed_check_left_is_replaced(repository, tmp_path):
    first, last = (subprocess.check_output(["git", "rev-parse", name], cwd=repository, text=True).strip()
                   for name in ("HEAD~1", "HEAD"))  # fmt: skip
    subprocess.run(["git", "worktree", "add", "-q", "--detach", tmp_path / "base", last], cwd=repository, check=True)
    with checkout(first, tmp_path / "base") as old:
        assert "old" in (old / "which.py").read_text()


def test_errors_name_the_file_the_revision_and_the_command(repository, tmp_path):
    with pytest.raises(ValueError, match="elsewhere.json: no commit has it"):
        revision_of(repository / "elsewhere.json")
    with pytest.raises(ValueError, match="git worktree add nowhere"), checkout("nowhere", tmp_path / "base"):
        pass
    (repository / "which.py").write_text("raise SystemExit(1)")
    with pytest.raises(ValueError, match=f"{sys.executable} benchmarks/run_all.py --only a .* wrote no result"):
        run_from(repository, ["a"], os.devnull)


def test_pairs_alternate_which_code_runs_first(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(confirm_losses, "run_from", lambda *given: ran.append(given) or {"code": given[0].name})
    roots = {"old": tmp_path / "old", "new": tmp_path / "new"}
    found = [in_turns(roots, "peers", number, ["a"]) for number in range(2)]
    assert [root.name for root, *_ in ran] == ["old", "new", "new", "old"]
    assert {(*names, peers) for _, names, peers in ran} == {("a", "peers")}
    assert found == [({"code": "new"}, {"code": "old"})] * 2
