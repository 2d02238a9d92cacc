"""One response while it is drawn: the parts that servers gave so far, each of one version of the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.rollout.sglang.response_parser import Part
from megatron_gspo.routing_replay.routes import RouteShape, as_routes


@dataclass
class Draft:
    """A response to `prompt`, as far as it is drawn. `limit`: most response tokens.

    parts and versions: what came back so far, and the (training) version of the weights that drew each part.
    """

    prompt: Prompt
    sample_index: int
    limit: int
    parts: list[Part] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"sample {self.prompt.index}/{self.sample_index}"

    @property
    def drawn(self) -> int:
        """Response tokens so far."""
        return sum(len(part.tokens) for part in self.parts)

    @property
    def done(self) -> bool:
        """Whether nothing is left to draw."""
        return bool(self.parts) and (self.parts[-1].finish_reason != "abort" or self.drawn >= self.limit)

    @property
    def oldest(self) -> int | None:
        """The oldest version among its tokens; None while there is none."""
        return min(self.versions, default=None)

    @property
    def tokens(self) -> list[int]:
        """Prompt and response so far: the next request's input."""
        return np.concatenate([self.prompt.token_ids, *(part.tokens for part in self.parts)]).tolist()

    @property
    def routes_start(self) -> int:
        """First input position whose routes are not known yet. The last token drawn was not fed."""
        return self.prompt.length + self.drawn - 1 if self.parts else 0

    def add(self, part: Part, version: int) -> None:
        """Append what a server drew. A part without a token adds nothing: neither its version nor its routes count."""
        if len(part.tokens):
            self.parts.append(part)
            self.versions.append(version)

    def forget(self) -> int:
        """Start over; returns how many tokens are thrown away."""
        count = self.drawn
        self.parts, self.versions = [], []
        return count

    def sample(self, shape: RouteShape | None, decode: Callable[[list[int]], str]) -> Sample:
        """The finished sample. Routes of each token are those of the request that fed it first."""
        response = np.concatenate([part.tokens for part in self.parts])
        versions = np.repeat(np.array(self.versions, dtype=np.int32), [len(part.tokens) for part in self.parts])
        reason = self.parts[-1].finish_reason
        routes = missing = None
        if shape is not None:
            rows = np.concatenate([part.routes for part in self.parts if part.routes is not None])
            routes, missing = as_routes(rows, shape.num_experts, where=self.name)
        return Sample(
            prompt_index=self.prompt.index,
            sample_index=self.sample_index,
            tokens=np.concatenate([self.prompt.token_ids, response]),
            prompt_length=self.prompt.length,
            loss_mask=np.ones(len(response), dtype=bool),
            rollout_log_probs=np.concatenate([part.log_probs for part in self.parts]),
            finish_reason="length" if reason == "abort" else reason,
            text=decode(response.tolist()),
            weight_version=int(versions.min()),
            token_versions=versions,
            routed_experts=routes,
            missing_routes=missing,
        )
