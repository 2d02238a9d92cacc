"""Sequence-level policy optimisation (GSPO) on Megatron-Core."""

from pathlib import Path

__version__ = "0.1.0"
PROGRAM = "megatron-gspo"  # the console command

# In a checkout, patches/ and tools/ are next to this package; setup.py maps them into it for an
# installation. With the checkout's root as a second place to look in, megatron_gspo.patches is the
# same module either way.
_root = Path(__file__).resolve().parent.parent
if (_root / "patches" / "__init__.py").is_file() and (_root / "setup.py").is_file():
    __path__.append(str(_root))
del _root, Path
