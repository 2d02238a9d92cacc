"""A conversion's work directory: resumed by the same job, refused to others, renamed at the end."""

import pytest

from megatron_gspo.errors import DiskError, InputError
from megatron_gspo.tools.convert.work_directory import Workspace, check_output, file_stamps

JOB = {"source": "a", "sizes": [1, 2]}


def test_the_result_becomes_the_output(tmp_path):
    with Workspace(tmp_path / "out", JOB) as work:
        (work.result / "file").write_text("x")
        work.record(0, {"bytes": 1})
        assert not (tmp_path / "out").exists()
        assert work.publish() == tmp_path / "out"
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "x"


def test_the_same_job_goes_on_and_half_a_line_is_passed_over(tmp_path):
    with pytest.raises(RuntimeError), Workspace(tmp_path / "out", JOB) as work:
        work.record(3, "done")
        raise RuntimeError("killed")
    with (tmp_path / "out.partial" / "journal.jsonl").open("a") as journal:
        journal.write("[4, ")
    with Workspace(tmp_path / "out", JOB) as work:
        assert work.done == {3: "done"}
    with (
        pytest.raises(InputError, match="holds another conversion"),
        Workspace(tmp_path / "out", {"source": "b"}),
    ):
        pass


def test_a_failure_before_anything_is_done_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), Workspace(tmp_path / "out", JOB):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_and_an_existing_output_are_refused(tmp_path):
    with Workspace(tmp_path / "out", JOB):
        with (
            pytest.raises(InputError, match="in use by another conversion"),
            Workspace(tmp_path / "out", JOB),
        ):
            pass
    (tmp_path / "there").mkdir()
    check_output(tmp_path / "there")
    (tmp_path / "there" / "file").touch()
    with (
        pytest.raises(InputError, match="there exists; remove it"),
        Workspace(tmp_path / "there", JOB),
    ):
        pass
    for out in ("there/file", "there/file/out"):
        with pytest.raises(
            InputError, match="exists; remove it|is not a directory; choose another output"
        ):
            check_output(tmp_path / out)


def test_room_is_checked(tmp_path):
    with Workspace(tmp_path / "out", JOB) as work:
        work.check_room(1)
        with pytest.raises(DiskError, match="free some space"):
            work.check_room(2**62)


def test_stamps_change_with_a_file(tmp_path):
    (tmp_path / "a").write_text("1")
    before = file_stamps(tmp_path)
    assert list(before) == ["a"] and before["a"][0] == 1
    (tmp_path / "a").write_text("22")
    assert file_stamps(tmp_path) != before
