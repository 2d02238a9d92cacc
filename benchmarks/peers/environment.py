"""The environment of TRL, verl, AReaL and Liger, the peers, apart from ours: `.venv-peers`, made on
first use.

python benchmarks/peers/environment.py    # makes it if it's absent and prints its interpreter
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# They require other versions of torch and transformers (Liger for Triton) and for packages that
# their losses and log-probs never use. Megatron-Core, of our own version, joins them: verl's
# log-probs are made of its functions.
WITHOUT_REQUIREMENTS = ("verl==0.9.1", "areal==1.0.4", "liger-kernel==0.8.5")


def peers_python() -> str:
    """The interpreter of `.venv-peers`, which is made if it's absent or older than its
    requirements.

    Raises:
        subprocess.CalledProcessError: pip could not install.
    """
    folder = ROOT / ".venv-peers"
    python = folder / "bin" / "python"
    stamp = folder / ".installed"
    requirements = Path(__file__).with_name("requirements.txt")
    newest = max(file.stat().st_mtime for file in (requirements, Path(__file__)))
    if stamp.is_file() and stamp.stat().st_mtime >= newest:
        return str(python)
    torch = metadata.version("torch").split("+")[0]
    transformers = metadata.version("transformers")
    print(
        f"making {folder}: torch {torch}, transformers {transformers}, the peers",
        file=sys.stderr,
        flush=True,
    )
    pip = [str(python), "-m", "pip", "install", "-q", "--no-compile"]
    # torch comes first and alone, so that no other package's requirement can choose another build
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, f"torch=={torch}"],
        [*pip, "-r", str(requirements), f"transformers=={transformers}"],
        [
            *pip,
            "--no-deps",
            *WITHOUT_REQUIREMENTS,
            f"megatron-core=={metadata.version('megatron-core')}",
        ],
    ):
        subprocess.run(command, check=True)
    stamp.touch()
    return str(python)


if __name__ == "__main__":
    print(peers_python())
