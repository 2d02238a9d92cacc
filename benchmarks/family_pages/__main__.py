"""Write docs/families/ and the index in docs/models.md:

    python -m benchmarks.family_pages              # from the stored figures, in seconds
    python -m benchmarks.family_pages --rehearse   # rehearses the ready configs without figures first, in hours

The figures of a config are stored as soon as it is rehearsed; the next call goes on from there.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from benchmarks.family_pages.facts import read_facts
from benchmarks.family_pages.page import all_pages
from benchmarks.family_pages.ready_configs import ReadyConfig, read_ready_config, ready_configs
from benchmarks.family_pages.rehearsed import (
    Rehearsed,
    read_rehearsals,
    rehearse_config,
    setting_of,
    write_rehearsals,
)


def has_figures(ready: ReadyConfig, rehearsals: Mapping[str, Rehearsed]) -> bool:
    """Whether the stored figures are of the config as it is."""
    stored = rehearsals.get(ready.name)
    return stored is not None and stored.setting == setting_of(ready)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rehearse",
        nargs="*",
        type=Path,
        metavar="CONFIG",
        help="rehearse these ready configs; without a name, all that have no figures",
    )
    parser.add_argument(
        "--ranks", default="stages", help="as those of megatron-gspo rehearse (default: stages)"
    )
    arguments = parser.parse_args()
    rehearsals = read_rehearsals()
    configs = ready_configs()
    chosen = [read_ready_config(file.resolve()) for file in arguments.rehearse or ()]
    if arguments.rehearse == []:
        chosen = [ready for ready in configs if not has_figures(ready, rehearsals)]
    for ready in chosen:
        rehearsals[ready.name] = rehearse_config(ready, arguments.ranks)
        write_rehearsals(rehearsals)
        print(ready.name, flush=True)
    for path, text in all_pages(read_facts(), configs, rehearsals).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
