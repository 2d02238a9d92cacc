"""Write docs/config.md from the fields of the config.

python -m megatron_gspo.tools.write_config_reference [FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_gspo.config import Config
from megatron_gspo.config.reference import markdown


def main(arguments: list[str]) -> None:
    file = Path(arguments[0] if arguments else "docs/config.md")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(markdown(Config), encoding="utf-8")
    print(file)


if __name__ == "__main__":
    main(sys.argv[1:])
