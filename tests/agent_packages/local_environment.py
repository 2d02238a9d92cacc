"""An environment of Harbor without a container: its folders are in a directory of this machine."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult

FOLDERS = ("app", "logs/agent", "logs/verifier", "logs/artifacts", "tests")


class LocalEnvironment(BaseEnvironment):
    @staticmethod
    def type() -> str:
        return "local"

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        self._root = tempfile.mkdtemp()
        for folder in FOLDERS:
            os.makedirs(f"{self._root}/{folder}")

    async def stop(self, delete: bool) -> None:
        await self.exec("tmux kill-server")
        shutil.rmtree(self._root)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        self._path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._path(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._path(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy(self._path(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._path(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
        **_: Any,
    ) -> ExecResult:
        """Run a command with the names of the folders replaced."""
        process = await asyncio.create_subprocess_shell(
            re.sub(r"(?<![\w/])/(app|logs|tests)\b", rf"{self._root}/\1", command),
            cwd=self._path(cwd or "/app"),
            env={**os.environ, "ROOT": self._root, "TMUX_TMPDIR": self._root, **(env or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await asyncio.wait_for(process.communicate(), timeout_sec)
        return ExecResult(
            stdout=output.decode(), stderr=errors.decode(), return_code=process.returncode or 0
        )

    def _path(self, path: str) -> Path:
        return Path(self._root + str(path))
