"""The environment of agents' packages, apart from ours: `.venv-agents`, made on first use.

python tests/agent_packages/environment.py    # makes it if it's absent and prints its interpreter
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def agents_python() -> str:
    """The interpreter of `.venv-agents`, which is made if it's absent or of other requirements.

    Raises:
        subprocess.CalledProcessError: pip could not install.
    """
    folder = ROOT / ".venv-agents"
    python = folder / "bin" / "python"
    stamp = folder / ".installed"
    made_of = REQUIREMENTS.read_text(encoding="utf-8")
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == made_of:
        return str(python)
    print(f"making {folder}", file=sys.stderr, flush=True)
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(python), "-m", "pip", "install", "-q", "--no-compile", "-r", str(REQUIREMENTS)],
    ):
        subprocess.run(command, check=True, stdout=sys.stderr)
    stamp.write_text(made_of, encoding="utf-8")
    return str(python)


if __name__ == "__main__":
    print(agents_python())
