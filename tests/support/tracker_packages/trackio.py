"""The part of trackio that is used, with its signatures (0.43)."""

from typing import Any

import fake_service


class Run:
    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        fake_service.take()
        fake_service.note("log", metrics=metrics, step=step)

    def finish(self) -> None:
        fake_service.note("finish")


def init(
    project: str,
    name: str | None = None,
    group: str | None = None,
    space_id: str | None = None,
    server_url: str | None = None,
    dataset_id: str | None = None,
    bucket_id: str | None = None,
    config: dict | None = None,
    resume: str = "never",
    settings: Any = None,
    private: bool | None = None,
    embed: bool = True,
    auto_log_gpu: bool | None = None,
    gpu_log_interval: float = 10.0,
    auto_log_cpu: bool | None = None,
    cpu_log_interval: float = 10.0,
    webhook_url: str | None = None,
    webhook_min_level: Any = None,
) -> Run:
    fake_service.begin()
    fake_service.note("init", project=project, identity=name, config=config, resume=resume)
    return Run()
