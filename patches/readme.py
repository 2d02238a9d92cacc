"""Write the tables of README.md from known_issues.py: ``python -m
megatron_gspo.patches.readme``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from megatron_gspo.patches.issue import KnownIssue
from megatron_gspo.patches.known_issues import GUARDS, PATCHES

README = Path(__file__).with_name("README.md")
COLUMNS = ("Handled by", "Versions", "Problem", "Upstream", "Test", "Delete when")
_MEGATRON = "https://github.com/NVIDIA/Megatron-LM"
_SGLANG = "https://github.com/sgl-project/sglang"
_VLLM = "https://github.com/vllm-project/vllm"
# Beginnings of link targets in known_issues.py.
LINKS = {
    "mcore": f"{_MEGATRON}/blob/core_v0.16.1/megatron/core/",
    "mcore-pull": f"{_MEGATRON}/pull/",
    "mcore-issue": f"{_MEGATRON}/issues/",
    "sglang-0.5.23": f"{_SGLANG}/blob/v0.5.23/python/sglang/",
    "sglang-0.5.15.post1": f"{_SGLANG}/blob/v0.5.15.post1/python/sglang/",
    "sglang-pull": f"{_SGLANG}/pull/",
    "vllm-0.33.0": f"{_VLLM}/blob/v0.33.0/vllm/",
}


def table(issues: Sequence[KnownIssue]) -> str:
    """A Markdown table, a row for each issue."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(cells(issue) for issue in issues)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cells(issue: KnownIssue) -> tuple[str, ...]:
    """The row of an issue, with whole links."""
    upstream = re.sub(r"\]\(([\w.-]+):(?!//)", lambda found: f"]({LINKS[found[1]]}", issue.upstream)
    return (
        issue.handled_by,
        issue.versions,
        issue.problem,
        upstream,
        issue.tests,
        issue.delete_when,
    )


def with_tables(page: str) -> str:
    """The page with the tables under "## Patches" and "## Guards" replaced."""
    for title, issues in (("Patches", PATCHES), ("Guards", GUARDS)):
        pattern = rf"(?m)(^## {title}\n(?:(?!## |\|).*\n)*)(?:^\|.*\n)+"
        found = list(re.finditer(pattern, page))
        if len(found) != 1:
            raise ValueError(f"README.md has {len(found)} tables under {title}; it needs one")
        page = page[: found[0].end(1)] + table(issues) + "\n" + page[found[0].end() :]
    return page


def main() -> None:
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
