"""Where responses come from: the embedded engine in this process, or inference servers that
hold the weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch

from megatron_gspo.config import Config, ConfigError, SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.errors import EngineError, InputError, first_line
from megatron_gspo.loop.engines import (
    group_kind,
    log_servers,
    playing,
    response_decoder,
    start_servers,
    stop_ids,
)
from megatron_gspo.loop.inputs import make_environments
from megatron_gspo.mcore.process_groups import compute_device
from megatron_gspo.models import ModelShape, family_of, read_config
from megatron_gspo.rollout.embedded.embedded_engine import EmbeddedEngine
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.rollout.server_engine.open_group import GroupKind
from megatron_gspo.rollout.server_engine.rollout_client import RolloutClient
from megatron_gspo.rollout.server_engine.server_api import ServedModel
from megatron_gspo.rollout.server_kinds import SERVER_KINDS
from megatron_gspo.servers.http_client import ServerClient, ServerError

Groups = list[list[Sample]]
_TAKE_SECONDS = 1.0  # finished groups are taken at least so often
_VERSION_SECONDS = 30.0  # until a server has told its weights


class ResponseEngine(Protocol):
    """One set of weights that answers prompts."""

    def groups(
        self,
        prompts: Sequence[Prompt],
        done: Collection[int],
        sampling: SamplingParams,
        *,
        seed: int,
    ) -> Iterator[Groups]:
        """The samples of every prompt whose index is not in `done`, some prompts at a time, as they
        are finished.

        Raises InputError for a prompt that the model can't take.
        """
        ...


class EmbeddedResponses:
    """`ResponseEngine` on an engine in this process.

    A prompt is decoded with the same others whatever is done, so that an evaluation that is
    continued repeats the bits of one that was never interrupted.
    """

    def __init__(self, engine: RolloutEngine, max_batch: int) -> None:
        """max_batch: samples that are asked for together."""
        self._engine = engine
        self._max_batch = max_batch

    def groups(
        self,
        prompts: Sequence[Prompt],
        done: Collection[int],
        sampling: SamplingParams,
        *,
        seed: int,
    ) -> Iterator[Groups]:
        """See `ResponseEngine.groups`."""
        ordered = sorted(prompts, key=lambda prompt: (prompt.length, prompt.index))
        size = max(self._max_batch // sampling.n_samples_per_prompt, 1)
        n = sampling.n_samples_per_prompt
        for start in range(0, len(ordered), size):
            chunk = ordered[start : start + size]
            if all(prompt.index in done for prompt in chunk):
                continue
            try:
                samples = self._engine.generate(chunk, sampling, seed=seed)
            except ValueError as error:
                raise InputError(first_line(error)) from None
            groups = [samples[i * n : (i + 1) * n] for i in range(len(chunk))]
            yield [group for group in groups if group[0].prompt_index not in done]


class ServedResponses:
    """`ResponseEngine` on the servers of a client."""

    def __init__(self, client: RolloutClient, kind: GroupKind) -> None:
        """kind: what a group is."""
        self._client = client
        self._kind = kind

    def groups(
        self,
        prompts: Sequence[Prompt],
        done: Collection[int],
        sampling: SamplingParams,
        *,
        seed: int,
    ) -> Iterator[Groups]:
        """See `ResponseEngine.groups`; the order is that in which the servers finish."""
        stream = self._client.stream(self._kind)
        try:
            left = len(
                stream.start(
                    [prompt for prompt in prompts if prompt.index not in done], sampling, seed=seed
                )
            )
        except ValueError as error:
            raise InputError(first_line(error)) from None
        while left:
            groups = stream.take(left, patience=_TAKE_SECONDS)
            left -= len(groups)
            if groups:
                yield groups


@contextmanager
def open_engine(
    config: Config, tokenizer: Any, urls: Sequence[str] = ()
) -> Iterator[ResponseEngine]:
    """The engine of `rollout.engine` with the weights of `model.path`, closed at the end.

    urls: of running servers that hold these weights; else servers are started, `sglang.num_servers`
    at least one. Raises ConfigError, EngineError or the errors of starting a server.
    """
    if config.rollout.engine not in ("embedded", *SERVER_KINDS):
        raise ConfigError(
            "rollout.engine",
            config.rollout.engine,
            "does not sample responses",
            f"set one of embedded, {', '.join(SERVER_KINDS)}",
        )
    with ExitStack() as stack:
        environments = make_environments(config)
        if environments is not None:
            stack.callback(environments.close)
        if config.rollout.engine == "embedded":
            embedded = _embedded(config, tokenizer)
            stack.callback(embedded.close)
            _, shape = family_of(read_config(config.model.path))
            engine = playing(embedded, config, shape, tokenizer, environments)
            stack.callback(engine.close)
            yield EmbeddedResponses(engine, embedded.max_batch)
            return
        _, shape = family_of(read_config(config.model.path))
        if not urls:
            servers = start_servers(config, trainer_gpus=0)
            stack.callback(servers.stop)
            urls = servers.urls
        kind = group_kind(config, shape, tokenizer, environments)
        yield ServedResponses(_client(config, tokenizer, shape, urls, stack), kind)


def _embedded(config: Config, tokenizer: Any) -> EmbeddedEngine:
    path = config.model.path
    try:
        return EmbeddedEngine(
            path,
            tokenizer=tokenizer,
            keep_special_tokens=config.data.keep_special_tokens,
            dtype=getattr(torch, config.model.dtype),
            device=compute_device(),
            max_batch=config.rollout.max_batch_size,
        )
    except (ValueError, OSError) as error:
        problem = f"the embedded engine refuses it: {first_line(error)}"
        fix = "fix it or use a server engine"
        raise ConfigError("model.path", path, problem, fix) from error


def _client(
    config: Config, tokenizer: Any, shape: ModelShape, urls: Sequence[str], stack: ExitStack
) -> RolloutClient:
    """A client of the servers, which all serve the same version of the weights."""
    model = ServedModel(shape, stop_ids(config.model.path, tokenizer, shape.vocab_size))
    servers = config.servers
    kind = SERVER_KINDS[config.rollout.engine]
    decode = response_decoder(config, shape, tokenizer)
    client = RolloutClient(urls, servers, model, decode, api=kind.api, log=log_servers)
    stack.callback(client.close)
    version = common_version(client)
    client.loop.run(client.pool.set_version(version, client.pool.servers))
    return client


def common_version(client: RolloutClient) -> str:
    """The version of the weights that the servers report.

    Raises EngineError if they do not report the same one.
    """
    found = client.loop.run(_versions(client))
    versions = set(found.values())
    version = versions.pop()
    if versions or version is None:
        shown = ", ".join(f"{url}: {each}" for url, each in found.items())
        raise EngineError(
            f"the servers do not report one version of the weights ({shown}); give servers of one"
            " model"
        )
    return version


async def _versions(client: RolloutClient) -> dict[str, str | None]:
    """URL -> the version that each server reports; all are asked at the same time."""

    async def ask(server: ServerClient) -> str | None:
        try:
            return await client.api.weight_version(server, timeout=_VERSION_SECONDS)
        except ServerError as error:
            raise EngineError(
                f"{server.url} gives no version ({first_line(error)}); check the URL"
            ) from None

    servers = [server.client for server in client.pool.servers]
    versions = await asyncio.gather(*(ask(server) for server in servers))
    return {server.url: version for server, version in zip(servers, versions, strict=True)}
