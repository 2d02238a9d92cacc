"""The environment in a run's config.yaml."""

import subprocess

from megatron_gspo.tracking.run_environment import git_revision


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        check=True,
        capture_output=True,
        text=True,
    )


def test_the_revision_of_a_checkout(tmp_path):
    assert git_revision(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    revision = git(tmp_path, "rev-parse", "HEAD").stdout.strip()
    assert git_revision(tmp_path) == revision
    (tmp_path / "new").write_text("not tracked")
    assert git_revision(tmp_path) == revision
    (tmp_path / "file").write_text("b")
    assert git_revision(tmp_path) == f"{revision}+changes"


def test_a_folder_inside_a_checkout_is_none(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "inside").mkdir()
    assert git_revision(tmp_path / "inside") is None
