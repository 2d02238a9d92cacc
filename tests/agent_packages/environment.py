"""The environments of agents' packages, apart from ours: `.venv-agents`, made on first use.

python tests/agent_packages/environment.py    # makes what is absent and prints the folder

Packages that need another Python, or other versions than the main ones, have environments of their
own within it: each file of `requirements/` is one. uv finds the versions in seconds, where pip
takes minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".venv-agents"
MAIN, *OTHERS = (
    Path(__file__).with_name("requirements") / f"{name}.txt"
    for name in ("main", "harbor", "nemo_gym", "verifiers")
)
UV = str(FOLDER / "bin" / "uv")
PYTHON = "3.12"  # of the others: the oldest of NeMo-Gym and Harbor


def make_environments() -> None:
    """Make each environment that is absent or of other requirements.

    Raises:
        subprocess.CalledProcessError: pip or uv could not install.
    """
    if not is_made(FOLDER, MAIN):
        run(sys.executable, "-m", "venv", "--clear", str(FOLDER))
        run(f"{FOLDER}/bin/python", "-m", "pip", "install", "-q", "uv")
        install(FOLDER, MAIN)
    for requirements in OTHERS:
        environment = FOLDER / requirements.stem
        if not is_made(environment, requirements):
            run(UV, "venv", "-q", "--clear", "--python", PYTHON, str(environment))
            install(environment, requirements)


def is_made(environment: Path, requirements: Path) -> bool:
    """Whether the environment has all of the file's packages."""
    stamp = environment / ".installed"
    return stamp.is_file() and stamp.read_bytes() == requirements.read_bytes()


def install(environment: Path, requirements: Path) -> None:
    """Install the file's packages."""
    python = f"{environment}/bin/python"
    run(UV, "pip", "install", "-q", "--python", python, "-r", str(requirements))
    (environment / ".installed").write_bytes(requirements.read_bytes())


def run(*command: str) -> None:
    """Run a command to its end. Where pyenv chooses the Python, it chooses PYTHON."""
    print(*command, file=sys.stderr, flush=True)
    subprocess.run(
        command, check=True, stdout=sys.stderr, env=os.environ | {"PYENV_VERSION": PYTHON}
    )


if __name__ == "__main__":
    make_environments()
    print(FOLDER)
