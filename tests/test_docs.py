"""The documentation: its code runs, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
NEEDS_A_WORLD = "megatron_gspo.mcore"  # blocks that start process groups; examples/ holds the tested ones


def blocks(page: Path) -> list[str]:
    """The python blocks of a page, dedented (a list item indents its own)."""
    found = re.findall(
        r"^( *)```python\n(.*?)^ *```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    return ["\n".join(line.removeprefix(indent) for line in code.splitlines()) for indent, code in found]


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda page: page.stem)
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    namespace: dict[str, object] = {}
    for number, code in enumerate(blocks(page), start=1):
        source = compile(code, f"{page.name} block {number}", "exec")
        if NEEDS_A_WORLD not in code:
            exec(source, namespace)  # noqa: S102 (our own pages)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        assert found.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(found), f"{page.name}: no heading for {target}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_figures_of_benchmarks_name_a_committed_result(page: Path) -> None:
    """Tables are checked figure by figure where `benchmarks/write_page.py` writes them (tests/benchmarks)."""
    text = page.read_text(encoding="utf-8")
    results = re.findall(r"benchmarks/results/([\w.-]+\.json)", text)
    for name in results:
        assert (ROOT / "benchmarks" / "results" / name).is_file(), f"{page.name}: no {name}"
    scripts = re.findall(r"\bbenchmarks/(\w+\.py)", text)
    assert results or not scripts, f"{page.name} has figures of {scripts[0]}; name the result that they are from"
