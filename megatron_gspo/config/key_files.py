"""Files that hold a secret key on their first line."""

from __future__ import annotations

from pathlib import Path

from megatron_gspo.config.config_error import ConfigError


def check_key_file(name: str, path: str) -> None:
    """Raise ConfigError unless a file has a key. name: of the config's key."""
    try:
        key = read_key(path)
    except (OSError, UnicodeDecodeError):
        key = ""
    if not key:
        problem = "cannot be read, or its first line is empty"
        raise ConfigError(name, path, problem, "put the key on its first line")


def read_key(path: str) -> str:
    """The key in a file."""
    return Path(path).read_text(encoding="utf-8").partition("\n")[0].strip()
