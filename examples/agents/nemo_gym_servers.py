"""A task of NeMo-Gym, with its servers in the process of the run (docs/agent_packages.md).

agents:
  function: examples/agents/nemo_gym_servers.py:run

A row of the data is one of NeMo-Gym's with a prompt, which tells the rows apart in logs:
{"prompt": "...", "responses_create_params": {"input": [...], "tools": [...]}, ...}
"""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient, get_response_json
from omegaconf import OmegaConf
from resources_servers.example_multi_step.app import (
    ExampleMultiStepResourcesServer,
    ExampleMultiStepResourcesServerConfig,
)
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig
from responses_api_models.openai_model.app import SimpleModelServer, SimpleModelServerConfig

from megatron_gspo.agents.agent_function import AgentTask

MAX_STEPS = 8
TYPES = {
    "resources": "resources_servers",
    "model": "responses_api_models",
    "agent": "responses_api_agents",
}


async def run(task: AgentTask) -> float:
    """The reward of the resources server; 0 if a call of it or of the policy is refused."""
    sockets = {name: socket.create_server(("127.0.0.1", 0)) for name in TYPES}
    configs = {
        name: {
            "host": "127.0.0.1",
            "port": sockets[name].getsockname()[1],
            "entrypoint": "app.py",
            "name": name,
        }
        for name in TYPES
    }
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1),  # none is asked
        global_config_dict=OmegaConf.create(
            {name: {TYPES[name]: {name: configs[name]}} for name in TYPES}
        ),
    )
    resources = ExampleMultiStepResourcesServer(
        config=ExampleMultiStepResourcesServerConfig(**configs["resources"], domain="agent"),
        server_client=client,
    )
    model = SimpleModelServer(
        config=SimpleModelServerConfig(
            **configs["model"],
            openai_base_url=task.base_url,
            openai_api_key=task.key,
            openai_model=task.model,
        ),
        server_client=client,
    )
    agent = SimpleAgent(
        config=SimpleAgentConfig(
            **configs["agent"],
            resources_server={"type": TYPES["resources"], "name": "resources"},
            model_server={"type": TYPES["model"], "name": "model"},
            max_steps=MAX_STEPS,
        ),
        server_client=client,
    )
    serving = []
    for name, server in {"resources": resources, "model": model, "agent": agent}.items():
        config = uvicorn.Config(server.setup_webserver(), log_level="warning")
        serving.append(asyncio.create_task(uvicorn.Server(config).serve([sockets[name]])))
    response = await client.post("agent", "/run", json=task.metadata)
    if response.status != 200:
        return 0.0  # what the policy has called, or a limit of the run
    return float((await get_response_json(response))["reward"])
