"""The part of SwanLab that is used, with its signatures."""

from collections.abc import Sequence
from typing import Any

import fake_service


class SwanLabRun:
    def log(
        self, data: dict[str, Any], step: int | None = None, print_to_console: bool = False
    ) -> None:
        fake_service.take()
        fake_service.note("log", metrics=data, step=step)

    def finish(self, state: Any = None, error: str | None = None) -> None:
        fake_service.note("finish")


def init(
    project: str | None = None,
    workspace: str | None = None,
    experiment_name: str | None = None,
    description: str | None = None,
    job_type: str | None = None,
    group: str | None = None,
    tags: Sequence[str] | None = None,
    config: dict | str | None = None,
    logdir: str | None = None,
    mode: str | None = None,
    load: str | None = None,
    public: bool | None = None,
    callbacks: Sequence[Any] | None = None,
    settings: Any = None,
    id: str | None = None,  # noqa: A002  # SwanLab's
    resume: str | bool | None = None,
    reinit: bool | None = None,
    **kwargs: Any,
) -> SwanLabRun:
    fake_service.begin()
    fake_service.note("init", project=project, identity=id, config=config, resume=resume)
    return SwanLabRun()
