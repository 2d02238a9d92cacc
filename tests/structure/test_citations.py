"""A citation of something that does not exist is found, one of something that exists is not."""

from __future__ import annotations

from pathlib import Path

from tests.structure.citations import Project, missing

PROJECT = Project(Path(__file__).resolve().parents[2])
PAGE = """
`tests/structure/citations.py:span_faults`, `docs/*.md`, `megatron_gspo.tools.plan`, `model.path`, `reward/mean`,
`policy_loss()`, `make test` and `python -m tests.seeded_bugs.run --list` exist.

`tests/structure/gone.py`, `citations.py:gone`, `megatron_gspo.algorithms.gone`, `reward/gone` and `gone_function()` do
not.

```bash
make gone  # not make test
megatron-gspo train run.yaml model.gone=1
```

```yaml
model:
  gone: 1
```
"""


def test_only_what_does_not_exist_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert missing(PROJECT, page) == [
        "citations.py does not define gone",
        "no config key model.gone",
        "no file tests/structure/gone.py",
        "no metric reward/gone",
        "no module or symbol megatron_gspo.algorithms.gone",
        "no target make gone",
        "the source has no gone_function",
    ]
