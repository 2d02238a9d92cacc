"""Builds the configured engines, each as a source of groups."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_gspo.agents.agent_process import AgentProcess
from megatron_gspo.agents.agent_run import RunLimits
from megatron_gspo.agents.agent_source import AgentEngine, AgentGroups, HostedGroups
from megatron_gspo.agents.function_program import FunctionProgram
from megatron_gspo.agents.host_settings import HostSettings, Runners
from megatron_gspo.agents.rendering import PackageRendering, Rendering, TemplateRendering
from megatron_gspo.agents.runner import CLIENT_ENV, COMMAND_ENV, AgentProgram, Program
from megatron_gspo.config import Config, ConfigError
from megatron_gspo.config.agents_section import AgentsConfig
from megatron_gspo.config.key_files import read_key
from megatron_gspo.config.server_urls import is_loopback
from megatron_gspo.environments.environment_pool import EnvironmentPool
from megatron_gspo.environments.episodes import (
    Encode,
    EpisodeEngine,
    EpisodeHost,
)
from megatron_gspo.errors import first_line
from megatron_gspo.launch_environment import local_world_size
from megatron_gspo.loop.weight_handles import handle_sources
from megatron_gspo.mcore.process_groups import compute_device, current_groups
from megatron_gspo.mcore.routing_replay.selections import Query
from megatron_gspo.mcore.weight_sources import default_sources
from megatron_gspo.models import ModelShape, family_of, read_config
from megatron_gspo.models.adapter_rules import linear_names
from megatron_gspo.models.model_shape import read_json
from megatron_gspo.models.peft_files import AdapterFacts
from megatron_gspo.parallel.rank_zero import run_on_every_rank, run_on_rank_zero
from megatron_gspo.rewards.scorer import scorer_maker
from megatron_gspo.rollout.embedded.embedded_engine import EmbeddedEngine
from megatron_gspo.rollout.embedded.transformers_config import transformers_config
from megatron_gspo.rollout.engine_protocol import RolloutEngine, end_tokens
from megatron_gspo.rollout.group_source import GroupSource, engine_name
from megatron_gspo.rollout.in_process_source import InProcessSource
from megatron_gspo.rollout.response_text import ResponseDecoder
from megatron_gspo.rollout.server_engine.open_group import RESPONSES, GroupKind
from megatron_gspo.rollout.server_engine.rollout_client import RolloutClient
from megatron_gspo.rollout.server_engine.server_api import ServedModel
from megatron_gspo.rollout.server_kinds import SERVER_KINDS
from megatron_gspo.rollout.server_source import ServerSource
from megatron_gspo.rollout.sft_engine import DemonstrationEngine
from megatron_gspo.rollout.weight_sync import WHOLE, Source, WeightSync, senders_of
from megatron_gspo.routing_replay.perturbation import KEY, Perturbation
from megatron_gspo.servers.server_launch import first_server_gpu
from megatron_gspo.servers.server_processes import LocalServers
from megatron_gspo.terminal import get_logger
from megatron_gspo.weight_transport.server_endpoints import ADAPTERS
from megatron_gspo.weight_transport.transport import WeightTransport
from megatron_gspo.weight_transport.update_group import local_address
from megatron_gspo.weight_transport.weight_update import make_transport

logger = get_logger(__name__)


def build_sources(
    config: Config,
    shape: ModelShape,
    tokenizer: Any,
    environments: EnvironmentPool | None,
    *,
    evaluates: bool,
    given: RolloutEngine | None = None,
) -> tuple[GroupSource, GroupSource | None]:
    """(source of the training samples, source of the held-out ones: the same unless training is
    supervised).

    Args:
        given: the engine in the ranks, ``embedded_engine`` or one that replaces the configured one.
        evaluates: whether there are held-out prompts.
    """

    def in_process(engine: RolloutEngine, *, plays: bool = True) -> GroupSource:
        """plays: its samples are runs or episodes, if there are agents or environments."""
        name = engine_name(type(engine))
        if plays:
            engine = playing(engine, config, shape, tokenizer, environments)
        return InProcessSource(
            engine, vocab_size=shape.vocab_size, group=dist.group.WORLD, name=name
        )

    supervised = config.algorithm.is_supervised
    if given is not None:
        training = in_process(given, plays=not supervised)
        if not evaluates:
            return training, None
        return training, in_process(given) if supervised else training
    generates = config.training.only != "train"
    if generates and config.rollout.engine in SERVER_KINDS:
        clients = client_ranks(config)
        kind = run_on_every_rank(
            lambda: (
                group_kind(config, shape, tokenizer, environments)
                if dist.get_rank() in clients
                else RESPONSES
            )
        )
        servers = _server_source(config, shape, tokenizer, clients, kind)
        return servers, servers
    demonstrations = DemonstrationEngine(text_encoder(tokenizer), tokenizer.eos_token_id)
    held_out = in_process(embedded_engine(config, shape, tokenizer)) if evaluates else None
    return in_process(demonstrations, plays=False), held_out


def generation_gpus(config: Config) -> int | None:
    """GPUs that generate: those of the trainer's processes or of the started servers; None for
    servers of your own, whose GPUs are not known, and on CPUs.
    """
    if config.rollout.engine not in SERVER_KINDS:
        return dist.get_world_size() if torch.cuda.is_available() else None
    settings = config.servers
    launch = SERVER_KINDS[config.rollout.engine].launch
    if settings.urls or launch.on_cpu(settings.server_args):
        return None
    return settings.num_servers * launch.gpus_per_server(settings.server_args)


def playing(
    engine: RolloutEngine,
    config: Config,
    shape: ModelShape,
    tokenizer: Any,
    environments: EnvironmentPool | None,
) -> RolloutEngine:
    """The engine, or one over it whose samples are runs of agents or episodes."""
    if config.agents.is_on:
        host = agent_process(config, shape, tokenizer)
        return AgentEngine(engine, host, max_batch=config.rollout.max_batch_size)
    if environments is None:
        return engine
    return EpisodeEngine(engine, episode_host(config, shape, tokenizer, environments))


def group_kind(
    config: Config, shape: ModelShape, tokenizer: Any, environments: EnvironmentPool | None
) -> GroupKind:
    """What a group on servers is: responses, runs of agents or episodes."""
    if config.agents.is_on:
        return AgentGroups(agent_process(config, shape, tokenizer))
    if environments is None:
        return RESPONSES
    return HostedGroups(episode_host(config, shape, tokenizer, environments))


def text_encoder(tokenizer: Any) -> Encode:
    """Text to token ids, without special tokens."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return encode


def response_decoder(config: Config, shape: ModelShape, tokenizer: Any) -> ResponseDecoder:
    """Token ids of a response to the text that verifiers and environments get."""
    end_ids = stop_ids(config.model.path, tokenizer, shape.vocab_size)
    return ResponseDecoder(tokenizer, end_ids, keep_special_tokens=config.data.keep_special_tokens)


def agent_process(config: Config, shape: ModelShape, tokenizer: Any) -> AgentProcess:
    """The process that plays the runs of this rank, once it is ready. Raises InputError for a
    tokenizer that can't render them and a verifier that can't be loaded."""
    agents = config.agents
    return AgentProcess(
        HostSettings(
            rendering_maker(config, shape, tokenizer),
            agent_runners(config) if agents.external else program_maker(agents),
            RunLimits(
                max_calls=agents.max_calls,
                max_context=config.max_context,
                max_run_tokens=config.max_run_tokens,
            ),
            concurrent_runs=agents.concurrent_runs,
            listen=agents.listen,
            nice=agents.nice,
            verifier=None if config.data.verifier is None else scorer_maker(config.data),
        )
    )


def program_maker(agents: AgentsConfig) -> Callable[[], Program]:
    """Makes what is started for each run of an agent."""
    if agents.function is not None:
        return functools.partial(
            FunctionProgram,
            agents.function,
            CLIENT_ENV | agents.env,
            run_timeout=agents.run_timeout,
            python=agents.python or sys.executable,
        )
    # A program works in a directory of its own, where these files are not. Links stay: an
    # environment's interpreter is one, and finds its packages by its own path.
    command = tuple(
        str(Path(argument).absolute()) if Path(argument).is_file() else argument
        for argument in agents.command
    )
    return functools.partial(
        AgentProgram, command, COMMAND_ENV | agents.env, run_timeout=agents.run_timeout
    )


def agent_runners(config: Config) -> Runners:
    """Who plays the runs of this rank in place of a program."""
    agents = config.agents
    return Runners(
        Path(config.run_dir) / "agents" / f"rank_{dist.get_rank()}.json",
        lease=agents.lease,
        run_timeout=agents.run_timeout,
        key=None if agents.runner_key_file is None else read_key(agents.runner_key_file),
    )


def rendering_maker(config: Config, shape: ModelShape, tokenizer: Any) -> Callable[[], Rendering]:
    """Makes what writes and reads messages. That raises InputError for a tokenizer that can't do
    it."""
    agents = config.agents
    if agents.renderer is not None:
        return functools.partial(
            PackageRendering, tokenizer, agents.renderer, thinking=agents.thinking
        )
    return functools.partial(
        TemplateRendering,
        tokenizer,
        stop_ids(config.model.path, tokenizer, shape.vocab_size),
        thinking=agents.thinking,
        options=config.data.chat_template_options,
    )


def episode_host(
    config: Config, shape: ModelShape, tokenizer: Any, environments: EnvironmentPool
) -> EpisodeHost:
    """What plays the episodes of this rank."""
    rollout = config.rollout

    @functools.cache
    def decoder() -> ResponseDecoder:
        return response_decoder(config, shape, tokenizer)

    @functools.cache
    def conversation() -> Rendering:
        if any(data.chat_template for data in config.data.by_source.values()):
            problem = "an environment with tools gets the prompt as it is in the data"
            raise ConfigError("data.chat_template", True, problem, "set it to false")
        return rendering_maker(config, shape, tokenizer)()

    return EpisodeHost(
        environments,
        RunLimits(
            max_calls=rollout.max_turns,
            max_call_length=rollout.max_turn_length or rollout.max_response_length,
            max_context=config.max_context,
            max_run_tokens=config.max_run_tokens,
        ),
        text_encoder(tokenizer),
        lambda ids: decoder()(ids),
        conversation,
        branches=not config.algorithm.needs_critic,
    )


def _server_source(
    config: Config, shape: ModelShape, tokenizer: Any, clients: Sequence[int], kind: GroupKind
) -> ServerSource:
    """clients: see `client_ranks`. kind: what their groups are."""
    rank = dist.get_rank()
    servers = config.servers
    end_ids = stop_ids(config.model.path, tokenizer, shape.vocab_size)
    decode = response_decoder(config, shape, tokenizer)
    model = ServedModel(
        shape,
        end_ids,
        return_routes=config.routing.needs_rollout_routes,
        top_log_probs=config.algorithm.score_centering,
        adapters=ADAPTERS if config.lora.sends_adapters else "",
    )
    started: LocalServers | None = None

    def start() -> list[str]:
        nonlocal started
        if not servers.num_servers:
            return list(servers.urls)
        trainer_gpus = local_world_size() if torch.cuda.is_available() else 0
        started = start_servers(with_update_arguments(config), trainer_gpus=trainer_gpus)
        return list(started.urls)

    urls = run_on_rank_zero(start)
    client = transport = None
    try:
        sources = weight_sources(config, urls)
        if rank in clients:
            client = RolloutClient(
                urls,
                servers,
                model,
                decode,
                api=SERVER_KINDS[config.rollout.engine].api,
                share=(clients.index(rank), len(clients)),
                processes=started,
                log=log_servers,
            )
        if rank == 0 or any(rank in senders_of(source) for source in sources):
            transport = _transport(config)
        sync = WeightSync(servers, client, transport, sources, log=log_servers)
    except BaseException:
        if started is not None:
            started.stop()
        raise
    source = ServerSource(
        client,
        clients,
        sync,
        servers,
        groups_per_step=config.rollout.rollout_batch_size,
        kind=kind,
        log=log_servers,
    )
    try:
        source.on_rank_zero(lambda client: client.check_servers())
    except BaseException:
        source.close()
        raise
    return source


def with_update_arguments(config: Config) -> Config:
    """The config with the arguments that servers need for what they get: quantised weights, without
    which they start, or adapters alone."""
    plan = config.quantization_plan
    servers = config.servers
    launch = SERVER_KINDS[config.rollout.engine].launch
    if plan is not None:
        args = launch.quantized_args(plan.config)
    elif config.lora.sends_adapters:
        targets = config.lora.targets or linear_names(*family_of(read_config(config.model.path)))
        args = launch.adapter_args(config.lora.rank, targets, servers.server_args)
    else:
        return config
    sections: dict[str, Any] = {
        servers.section: replace(servers, server_args=(*args, *servers.server_args))
    }
    return replace(config, **sections)


def client_ranks(config: Config) -> tuple[int, ...]:
    """The ranks that request samples: the first of each data-parallel replica, if its node reaches
    the servers. A collective."""
    groups = current_groups()
    first = run_on_rank_zero(lambda: dist.get_process_group_ranks(groups.dp))
    on_first_node = bool(config.servers.num_servers) or any(
        is_loopback(url) for url in config.servers.urls
    )
    return tuple(rank for rank in first if not on_first_node or rank < local_world_size())


def weight_sources(config: Config, urls: Sequence[str]) -> tuple[Source, ...]:
    """What the ranks send to the servers at `urls`; rank 0 alone sends where the servers listen on
    its node only, and ranks of other nodes would have to send them requests. A collective."""
    family, _ = family_of(read_config(config.model.path))
    sources = default_sources(current_groups(), family)
    servers = config.servers
    if servers.weight_transport == "ipc":
        if family.stacks_experts and config.parallel.expert_model_parallel_size > 1:
            problem = (
                f"a {family.model_type} server takes a layer's experts as one tensor, which no rank"
                " holds"
            )
            fix = "set it to disk, tensor or distributed"
            raise ConfigError(f"{servers.section}.weight_transport", "ipc", problem, fix)
        return handle_sources(config, urls, local_world_size())
    if config.lora.sends_adapters and servers.weight_transport == "tensor":
        return WHOLE
    one_node = sources[-1].rank < local_world_size()
    # Who sends all requests.
    by_rank_zero = servers.weight_transport == "disk" or servers.uses_receiver
    return sources if one_node or bool(servers.urls) or by_rank_zero else WHOLE


def _transport(config: Config) -> WeightTransport:
    address = config.servers.master_address
    if dist.get_rank() >= local_world_size():
        first_node = f"http://{os.environ['MASTER_ADDR']}"  # where servers that the run starts are
        address = local_address(first_node) if config.servers.num_servers else None
    plan = config.quantization_plan
    lora = config.lora
    adapters = None
    if lora.sends_adapters:
        adapters = AdapterFacts(lora.rank, lora.alpha, lora.rslora, config.model.path)
    return make_transport(
        config.servers,
        SERVER_KINDS[config.rollout.engine].api,
        run_dir=config.run_dir,
        source=config.model.path,
        address=address,
        quantization=None if plan is None else plan.config,
        adapters=adapters,
    )


def log_servers(line: str) -> None:
    """Print a line about the servers, as this rank sees them."""
    where = (
        f" as rank {dist.get_rank()} sees it" if dist.is_initialized() and dist.get_rank() else ""
    )
    logger.info(f"servers{where}: {line}")


def embedded_engine(config: Config, shape: ModelShape, tokenizer: Any) -> EmbeddedEngine:
    """An engine without weights, which come with the first update."""
    source = transformers_config(config.model.path)
    try:
        return EmbeddedEngine(
            source,
            tokenizer=tokenizer,
            eos_token_ids=stop_ids(config.model.path, tokenizer, shape.vocab_size),
            dtype=getattr(torch, config.model.dtype),
            device=compute_device(),
            keep_special_tokens=config.data.keep_special_tokens,
            max_batch=config.rollout.max_batch_size,
            return_routed_experts=config.routing.needs_rollout_routes,
            record_selections=config.routing.metrics and shape.indexer is not None,
            top_log_probs=config.algorithm.score_centering,
        )
    except ValueError as error:
        problem = f"the embedded engine refuses it: {first_line(error)}"
        fix = "fix it or use another model"
        raise ConfigError("model.path", config.model.path, problem, fix) from error


def rollout_selections(engine: RolloutEngine | None) -> Mapping[Query, np.ndarray]:
    """`EmbeddedEngine.selections` of the engine in this rank; servers return none."""
    return engine.selections if isinstance(engine, EmbeddedEngine) else {}


def perturb_rollout(engine: RolloutEngine | None, perturbation: Perturbation) -> None:
    """Perturb the routers of the engine in this rank from now on; nothing of servers.

    Raises ``ConfigError`` for an engine or a model whose routers cannot be perturbed.
    """
    if engine is None:
        return
    problem = f"the routers of {type(engine).__name__} cannot be perturbed"
    try:
        if isinstance(engine, EmbeddedEngine):
            engine.perturb_routers(perturbation)
            return
    except ValueError as error:
        problem = first_line(error)
    raise ConfigError(KEY, perturbation.name, problem, "remove the key")


def start_servers(config: Config, *, trainer_gpus: int) -> LocalServers:
    """Start the servers that the config asks for, of ``model.path``. trainer_gpus: of this node,
    which they leave free.

    Raises the errors of `LocalServers.start`.
    """
    settings = config.servers
    launch = SERVER_KINDS[config.rollout.engine].launch
    log_dir = str(Path(config.run_dir) / "servers")
    first_gpu = None
    if not launch.on_cpu(settings.server_args):
        first_gpu = first_server_gpu(
            settings,
            launch.gpus_per_server(settings.server_args),
            trainer_gpus=trainer_gpus,
            visible_gpus=torch.cuda.device_count(),
            option_name=launch.gpu_option,
        )
    servers = LocalServers(
        launch(
            settings,
            model=config.model.path,
            dtype=config.model.dtype,
            routed_experts=config.routing.needs_rollout_routes,
            log_dir=log_dir,
            first_gpu=first_gpu,
        ),
        log=log_servers,
    )
    log_servers(f"starting {settings.num_servers}; logs are in {log_dir}")
    servers.start()
    return servers


def stop_ids(path: str, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """The end tokens of the model in a directory, as engines find them; ``ConfigError`` if
    there are none.
    """
    file = Path(path) / "generation_config.json"
    configured = read_json(file).get("eos_token_id") if file.is_file() else None
    configured = read_config(path).get("eos_token_id") if configured is None else configured
    try:
        return end_tokens(configured, tokenizer, vocab_size)
    except ValueError as error:
        raise ConfigError(
            "model.path", path, str(error), "set eos_token_id in its config.json"
        ) from None
