"""The text of the pages."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.family_pages.facts import ROOT, FamilyFacts, Variant
from benchmarks.family_pages.ready_configs import ReadyConfig
from benchmarks.family_pages.rehearsed import Rehearsed
from megatron_gspo.gpus import GIB
from megatron_gspo.models import family_of, read_config
from megatron_gspo.tools.plan.layouts import name_of
from megatron_gspo.tools.plan.parameters import active_parameters, total_parameters

PROOFS = ("0.16.1", "0.19.2")  # of megatron-core
_INDEX = re.compile(r"<!-- index -->\n(?:.*\n)*?<!-- /index -->")
_WRITTEN = "<!-- Written by `python -m benchmarks.family_pages`. -->"


def page_of(
    facts: FamilyFacts, configs: Sequence[ReadyConfig], rehearsals: Mapping[str, Rehearsed]
) -> str:
    """The page of a family. configs: those of its variants, the smallest first."""
    sections = [
        f"# {facts.title}\n\n{_WRITTEN}\n\n{filled(facts.about)}",
        f"## Variants\n\n{variants_table(facts)}",
        f"## Smallest start\n\n{smallest_start(facts, configs)}",
        f"## Layouts\n\n{layouts(configs, rehearsals)}",
        f"## Engines and limits\n\n{filled(facts.engines)}",
        f"## Proof\n\n{proven(facts)}",
    ]
    return "\n\n".join(sections) + "\n"


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def variants_table(facts: FamilyFacts) -> str:
    """Parameters are those of the language model, without multi-token prediction."""
    rows = []
    for variant in facts.variants:
        names = ", ".join((variant.name, *variant.like))
        rows.append([names, f"`{variant.type}`", *_parameters(variant), variant.files])
    others = [f"{name} (`{variant.type}`)" for variant in facts.variants for name in variant.others]
    text = table(["model", "`model_type`", "parameters", "of a token", "files"], rows)
    return text + (f"\n\nAlso {', '.join(others)}." if others else "")


def _parameters(variant: Variant) -> list[str]:
    """Of the model, and of one token's share of it; blank where no config.json is at hand."""
    if variant.config is None:
        return ["", ""]
    _, shape = family_of(read_config(variant.config))
    return [_billions(total_parameters(shape)), _billions(active_parameters(shape))]


def _billions(number: int) -> str:
    return f"{number / 1e9:.3g}B" if number < 1e12 else f"{number / 1e9:.0f}B"


def smallest_start(facts: FamilyFacts, configs: Sequence[ReadyConfig]) -> str:
    """The download of the model of the config with the fewest GPUs, what prepares its files, the
    config's command, and what to know of the files.
    """
    first = configs[0]
    variant = next(variant for variant in facts.variants if variant.name == first.model)
    download = f"hf download {variant.repository} --local-dir /models/{variant.name}"
    commands = "\n".join(map(wrapped, (download, *facts.prepare, first.command)))
    return f"```bash\n{commands}\n```" + (f"\n\n{filled(facts.download)}" if facts.download else "")


def wrapped(command: str) -> str:
    """A shell command in lines that a browser shows whole."""
    words = " ".join(command.replace("\\\n", " ").split())
    lines = textwrap.wrap(words, 90, break_long_words=False, break_on_hyphens=False)
    return " \\\n    ".join(lines)


def layouts(configs: Sequence[ReadyConfig], rehearsals: Mapping[str, Rehearsed]) -> str:
    """A row for each config."""
    rows = []
    for ready in configs:
        file = ready.file.relative_to(ROOT).as_posix()
        link = f"[{ready.name}](../../{file})"
        gpus = f"{ready.world} x {ready.memory}, {ready.servers}"
        row = [link, gpus, name_of(ready.config.parallel)]
        if ready.name not in rehearsals:
            rows.append([*row, "", "", ""])
            continue
        figures = rehearsals[ready.name].figures
        sizes = [f"{size / GIB:.1f}" for size in (figures.state_bytes, figures.peak)]
        rows.append([*row, *sizes, f"{figures.seconds:.0f}"])
    states = "[states, GiB](../models.md#figures)"
    return table(["config", "GPUs, servers", "layout", states, "peak", "step, s"], rows)


def proven(facts: FamilyFacts) -> str:
    """The layouts of the committed proof with the worst gradient, and what else has run."""
    worst = 0.0
    counts = []
    for version in PROOFS:
        file = ROOT / "benchmarks" / "results" / f"equivalence-{version}.json"
        measured = json.loads(file.read_text(encoding="utf-8"))["layouts"]
        proved = [measured[model] for model in facts.models if model in measured]
        counts.append((len(proved), sum(map(len, proved))))
        errors = [result["errors"]["gradient"][0] for of in proved for result in of.values()]
        worst = max([worst, *errors])
    models, number = min(counts)
    if not number:
        return filled(facts.proven)
    return filled(
        f"[{number} layouts](../testing.md#parallel-layouts) of {_models(models)} agree with float64;"
        f" the worst gradient is off by {worst:.1e}. {facts.proven}"
    )


def filled(text: str) -> str:
    """Text in lines of a page's width."""
    return textwrap.fill(
        " ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False
    )


def _models(number: int) -> str:
    return "a tiny model" if number == 1 else f"{number} tiny models"


def index_table(pages: Sequence[FamilyFacts]) -> str:
    """A row for each page, with the names of its models."""
    rows = []
    for facts in pages:
        variants = facts.variants
        names = [name for variant in variants for name in (variant.name, *variant.like)]
        others = [name for variant in variants for name in variant.others]
        link = f"[{facts.page}](families/{facts.page}.md)"
        rows.append([link, ", ".join([*names, *others])])
    return table(["page", "models"], rows)


def with_index(text: str, pages: Sequence[FamilyFacts]) -> str:
    """The text of docs/models.md with its table."""
    return _INDEX.sub(f"<!-- index -->\n\n{index_table(pages)}\n\n<!-- /index -->", text, count=1)


def all_pages(
    pages: Sequence[FamilyFacts],
    configs: Sequence[ReadyConfig],
    rehearsals: Mapping[str, Rehearsed],
) -> dict[Path, str]:
    """The text of every file that the command writes."""
    docs = ROOT / "docs"
    texts = {}
    for facts in pages:
        names = {variant.name for variant in facts.variants}
        own = [ready for ready in configs if ready.model in names]
        texts[docs / "families" / f"{facts.page}.md"] = page_of(facts, own, rehearsals)
    index = docs / "models.md"
    texts[index] = with_index(index.read_text(encoding="utf-8"), pages)
    return texts
