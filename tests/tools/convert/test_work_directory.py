"""A conversion's work directory: resumed by the same job, refused to others, renamed at the end."""

import pytest

from megatron_gspo.errors import DiskError
from megatron_gspo.tools.convert.work_directory import Workspace

JOB = {"source": "a", "sizes": [1, 2]}


def test_room_is_checked(tmp_path):
    with Workspace(tmp_path / "out", JOB) as work:
        work.check_room(1)
        with pytest.raises(DiskError, match="free some space"):
            work.check_room(2**62)
