"""When the trainer's memory is released and taken back, and that whole runs are the same with
it.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_gspo.config import Config
from megatron_gspo.errors import SharedEngineError
from megatron_gspo.loop.offloading_source import OffloadingSource
from megatron_gspo.mcore.offload import PolicyMemory
from megatron_gspo.train import train
from megatron_gspo.weight_transport.weight_source import WeightSource, numbered
from tests.support.distributed import run_distributed
from tests.support.training_runs import base_config, records, tiny_model


class Memory:
    """A policy's memory that notes what is done to it."""

    def __init__(self, events: list[str], name: str) -> None:
        self._events = events
        self._name = name
        self.released = False

    def release(self, *, keep_weights: bool = False) -> None:
        self.released = True
        self._events.append(f"{self._name} released" + " but weights" * keep_weights)

    def restore(self) -> None:
        if self.released:
            self.make_room()
            self._events.append(f"{self._name} restored")
        self.released = False

    def make_room(self) -> None:
        raise AssertionError("not expected to be called")


class Source:
    """A source that notes its calls. fails: whether `pause` raises."""

    engine_name = "scripted"

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.fails = False

    def pause(self, *, keep: bool) -> None:
        self.events.append(f"pause keep={keep}")
        if self.fails:
            raise SharedEngineError("no server")

    def update_weights(self, weights: Any, *, version: int) -> None:
        self.events.append(f"version {version}")
        self.weights = weights
        assert [name for name, _ in weights()] == ["a", "b"]
        self.events.append("cache")

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.events.append(name)


def build() -> tuple[OffloadingSource, Source, Any, list[str]]:
    events: list[str] = []
    critic: Any = SimpleNamespace(memory=Memory(events, "critic"))
    policy: Any = SimpleNamespace(
        memory=Memory(events, "policy"), critic=critic, trained={"": None, "critic.": critic}
    )
    policy.trained[""] = policy
    reference: Any = SimpleNamespace(memory=Memory(events, "reference"))
    inner = Source(events)
    return OffloadingSource(inner, policy, reference), inner, policy, events


def stream(source: WeightSource | None = None, /) -> Any:
    yield from (("a", None), ("b", None))


def test_the_devices_are_the_engines_from_a_weight_update_to_a_pause() -> None:
    source, inner, policy, events = build()
    assert source.engine_name == "scripted"
    source.update_weights(stream, version=3)
    whole = ["policy released", "reference released", "critic released"]
    assert events == ["policy released but weights", *whole[1:], "version 3", *whole, "cache"]
    for call in (
        lambda: source.submit([], None, seed=0),
        lambda: source.collect(0),
        lambda: source.score([]),
        lambda: source.generate([], None, seed=0),
    ):
        events.clear()
        call()
        assert events[:3] == whole and len(events) == 4
    events.clear()
    source.pause(keep=True)
    # The reference's weights are restored in its next pass.
    assert events == ["pause keep=True", "policy restored"]
    events.clear()
    list(inner.weights())  # for a server that has lost them
    assert events == whole
    events.clear()
    first, last = numbered([WeightSource(0), WeightSource(2)])
    list(inner.weights(first))  # one source after the other
    assert events == []
    list(inner.weights(last))
    assert events == whole
    for call in (source.pending, source.metrics, source.close):
        call()
    assert events[3:] == ["pending", "metrics", "close"]


def test_the_engine_is_paused_before_the_trainer_takes_its_memory_back() -> None:
    source, inner, policy, events = build()
    source.collect(0)
    events.clear()
    policy.memory.restore()
    assert events == ["pause keep=True", "policy restored"]
    source.collect(0)
    inner.fails = True
    events.clear()
    policy.memory.restore()  # for the checkpoint before the run ends
    assert events == ["pause keep=True", "policy restored"]
    policy.critic.memory.restore()  # the engine is paused already
    assert events[2:] == ["critic restored"]


def run(rank: int, world_size: int, model: str, folder: str) -> list[int]:
    """The same short run without and with it; how often memory was released in each."""
    counts = []
    release = PolicyMemory.release

    def counted(self: PolicyMemory, **options: Any) -> None:
        counts[-1] += 1
        release(self, **options)

    PolicyMemory.release = counted  # type: ignore[method-assign]
    os.environ["WORLD_SIZE"] = str(world_size)  # as torchrun sets it
    for name, offloads in (("plain", False), ("offloaded", True)):
        counts.append(0)
        rollout = {"offload_trainer": offloads}
        config = base_config(
            model,
            Path(folder) / name,
            rollout=rollout,
            training={"steps": 2},
            algorithm={"kl_loss_coef": 0.01},
            checkpoint={"save_interval": 1},
            parallel={"expert_model_parallel_size": 2},
            evaluation={"eval_interval": 1},
        )
        train(Config.from_dict(config))
    return counts


def test_a_run_is_the_same_bits(tmp_path: Path) -> None:
    counts = run_distributed(run, 2, tiny_model(tmp_path / "model"), str(tmp_path))
    assert counts[0] == counts[1] and counts[0][0] == 0 < counts[0][1]
    plain = records(tmp_path / "plain")
    offloaded = records(tmp_path / "offloaded")
    assert len(plain) == 3 and plain == offloaded
    files = [
        sorted((tmp_path / name / "hf").glob("*.safetensors")) for name in ("plain", "offloaded")
    ]
    assert files[0]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]
