"""A server that answers as SGLang does, with the log-probs of a Hugging Face model that it
loads from disk.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.servers.web_server import WebServer
from tests.support.sglang_responses import answer
from tests.support.training_runs import tiny_model


class ModelServer(WebServer):
    """Serves `model`, and after an update the weights of the update's directory, in float32.

    ignores_ties: its output layer is random where config.json ties it to the embeddings, as
    SGLang's of Qwen3-MoE. Responses are the likeliest tokens. updates, scored: numbers of requests.
    """

    def __init__(self, model: str, *, ignores_ties: bool = False) -> None:
        super().__init__(self._handle)
        self.updates = 0
        self.scored = 0
        self._ignores_ties = ignores_ties
        self._version = "default"
        self._load(model)

    def _load(self, folder: str) -> None:
        torch.manual_seed(1)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if self._ignores_ties and self._model.config.tie_word_embeddings:
            embeddings = self._model.get_input_embeddings().weight
            head = torch.nn.Linear(*reversed(embeddings.shape), bias=False)
            torch.nn.init.normal_(head.weight, std=float(embeddings.detach().std()))
            self._model.lm_head = head

    @torch.no_grad()
    def _log_probs(self, tokens: list[int]) -> torch.Tensor:
        """[L, vocabulary]: of the token after each."""
        logits = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json() if request.can_read_body else {}
        if request.path == "/update_weights_from_disk":
            self._load(body["model_path"])
            self.updates += 1
        if request.path == "/generate":
            return web.json_response(self._respond(body))
        self._version = body.get("new_version") or body.get("weight_version") or self._version
        status = {
            "success": True,
            "weight_version": self._version,
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
        }
        return web.json_response(status)

    def _respond(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens: list[int] = list(body["input_ids"])
        context = len(tokens)
        scores: dict[str, Any] = {}
        if body.get("logprob_start_len") == 0:
            self.scored += 1
            scores = self._scores(tokens, body.get("top_logprobs_num", 0))
        log_probs: list[float] = []
        for _ in range(body["sampling_params"]["max_new_tokens"]):
            best = self._log_probs(tokens)[-1].max(dim=-1)
            log_probs.append(float(best.values))
            tokens.append(int(best.indices))
        return answer(
            tokens[context:],
            log_probs,
            "length",
            context,
            weight_version=self._version,
            weight_versions=None,
            **scores,
        )

    def _scores(self, tokens: list[int], count: int) -> dict[str, Any]:
        """Of the input, as SGLang sends them."""
        every = self._log_probs(tokens)[:-1]
        values = every.gather(1, torch.tensor(tokens)[1:, None])[:, 0].tolist()
        inputs = [[None, tokens[0], None]]
        inputs += [[value, token, None] for value, token in zip(values, tokens[1:], strict=True)]
        if not count:
            return {"input_token_logprobs": inputs}
        top = every.topk(count, dim=1)
        rows = [
            [[value, token, None] for value, token in zip(row, ids, strict=True)]
            for row, ids in zip(top.values.tolist(), top.indices.tolist(), strict=True)
        ]
        return {"input_token_logprobs": inputs, "input_top_logprobs": [None, *rows]}


def tied_model(folder: Path, *, tied: bool) -> str:
    """A random Qwen3-MoE, with embeddings that are its output layer or not."""
    path = Path(tiny_model(folder))
    config = json.loads((path / "config.json").read_text())
    weights = load_file(path / "model.safetensors")
    if tied:
        del weights["lm_head.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    return str(path)
