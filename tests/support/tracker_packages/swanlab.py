"""The part of SwanLab that is used, with its signatures (0.10)."""

from collections.abc import Mapping, Sequence
from typing import Any

import fake_service


class Run:
    def log(self, data: Mapping[str, Any], step: int | None = None) -> None:
        fake_service.take()
        fake_service.note("log", metrics=dict(data), step=step)

    def finish(
        self,
        state: str = "success",
        error: str | None = None,
        async_log_timeout: int | None = None,
    ) -> None:
        fake_service.note("finish")


def init(
    *,
    reinit: bool | None = None,
    log_dir: str | None = None,
    mode: str | None = None,
    workspace: str | None = None,
    project: str | None = None,
    public: bool | None = None,
    name: str | None = None,
    color: str | None = None,
    description: str | None = None,
    job_type: str | None = None,
    group: str | None = None,
    tags: Sequence[str] | None = None,
    id: str | None = None,  # noqa: A002  # SwanLab's
    resume: str | bool | None = None,
    parallel: str | None = None,
    config: Any = None,
    settings: Any = None,
    callbacks: Any = None,
) -> Run:
    fake_service.begin()
    fake_service.note("init", project=project, identity=id, config=config, resume=resume)
    return Run()
