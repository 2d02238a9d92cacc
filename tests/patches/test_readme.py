"""patches/README.md has the tables of known_issues.py: every patch, its upstream place and a
test that exists.
"""

from __future__ import annotations

import re
from pathlib import Path

from megatron_gspo.patches.known_issues import PATCHES
from megatron_gspo.patches.readme import with_tables

ROOT = Path(__file__).parents[2]
README = (ROOT / "patches" / "README.md").read_text()
HELPERS = {"__init__.py", "mark.py", "issue.py", "known_issues.py", "readme.py"}


def test_the_tables_are_up_to_date():
    assert with_tables(README) == README, "run python -m megatron_gspo.patches.readme"


def test_every_file_is_in_the_table():
    listed = {
        file[1] for issue in PATCHES if (file := re.match(r"`([\w/]+\.py)`", issue.handled_by))
    }
    folder = ROOT / "patches"
    assert (
        listed == {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")} - HELPERS
    )
