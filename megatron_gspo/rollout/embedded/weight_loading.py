"""Writing a stream of Hugging Face checkpoint tensors into a live Transformers model, in place.

Transformers 5.0 and later keep the experts of a layer in two 3-d parameters; checkpoints have one
tensor per expert and projection. `WeightTargets` maps every checkpoint name to its slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatron_gspo.models.families import FAMILIES


@dataclass(frozen=True)
class WeightTargets:
    """The destination of each checkpoint tensor of a model."""

    slices: dict[str, Tensor]
    """Checkpoint name -> view into the model's parameter or buffer."""

    fused: dict[str, tuple[Tensor, tuple[str, ...]]]
    """The model's own name of a fused parameter -> (parameter, the checkpoint names that it
    covers)."""

    tied: dict[str, str]
    """Name that may be absent -> name whose tensor it shares."""

    name_in_model: Callable[[str], str]
    """The model's own name of a checkpoint's tensor."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> WeightTargets:
        """The targets of `model`: valid as long as its parameters are not replaced."""
        slices: dict[str, Tensor] = {}
        fused: dict[str, tuple[Tensor, tuple[str, ...]]] = {}
        tied: dict[str, str] = {}
        first_name: dict[tuple, str] = {}
        for name, tensor in model.state_dict().items():
            memory = (tensor.data_ptr(), tensor.shape, tensor.dtype)
            if tensor.numel() and memory in first_name:
                tied[name] = first_name[memory]
                continue
            first_name[memory] = name
            of_experts = _expert_slices(model, name, tensor)
            if of_experts:
                fused[name] = (tensor, tuple(of_experts))
                slices |= of_experts
            else:
                slices[name] = tensor
        name_in_model: Callable[[str], str] = str
        family = FAMILIES.get(model.config.model_type)
        if family is not None:
            name_in_model = family.name_in_transformers
        return cls(slices, fused, tied, name_in_model)

    @torch.no_grad()
    def write(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy every tensor to its place (dtype and device are converted); all of them, each
        exactly once.

        A tied tensor may be absent or must equal the one it is tied to. The model's own name of a
        fused parameter is accepted instead of its per-expert names. Raises ValueError naming the
        tensor if one is unknown, repeated, of the wrong shape or missing; the stream is still read
        to its end, and part of the model may have changed.
        """
        written: set[str] = set()
        extra: list[tuple[str, Tensor]] = []
        error = ""
        for name, tensor in named_tensors:
            if error:
                continue  # producing the stream may be collective: the other ranks would hang
            name = self.name_in_model(name)
            if name in self.tied:
                extra.append((name, tensor))
                continue
            target, covers = self.fused.get(name) or (self.slices.get(name), (name,))
            error = _fault(name, tensor, target, written.intersection(covers))
            if not error and target is not None:
                target.copy_(tensor)
                written.update(covers)
        error = error or self._missing(written) or self._tie_fault(extra)
        if error:
            raise ValueError(error)

    def _missing(self, written: set[str]) -> str:
        missing = [name for name in self.slices if name not in written]
        if not missing:
            return ""
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return (
            f"weight {missing[0]}{more} missing from the stream: send every tensor of the"
            " checkpoint"
        )

    def _tie_fault(self, extra: list[tuple[str, Tensor]]) -> str:
        for name, tensor in extra:
            target = self.slices[self.tied[name]]
            error = _fault(name, tensor, target, set())
            if not error and not torch.equal(target, tensor.to(target)):
                error = (
                    f"weight {name} differs from {self.tied[name]}, but the model ties them: leave"
                    " it out"
                )
            if error:
                return error
        return ""


def _fault(name: str, tensor: Tensor, target: Tensor | None, repeated: set[str]) -> str:
    if target is None:
        return f"weight {name} is not in the model: check the checkpoint names and the model config"
    if repeated:
        return f"weight {min(repeated)} comes twice: send every tensor once"
    if tensor.shape != target.shape:
        shapes = f"{list(tensor.shape)}, the model has {list(target.shape)}"
        return f"weight {name} has shape {shapes}: send full tensors"
    return ""


def _expert_slices(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Checkpoint name -> slice of a fused expert parameter; empty for any other tensor.

    The layout of the library's `qwen2_moe` conversion, which Qwen3-MoE uses: gate_up_proj [E, 2i,
    h] is gate over up, down_proj [E, h, i]. Experts without a gate have up_proj [E, i, h].
    """
    prefix, _, kind = name.rpartition(".")
    if kind not in ("gate_up_proj", "up_proj", "down_proj") or tensor.dim() != 3:
        return {}
    module = model.get_submodule(prefix)
    if getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True):
        return {}  # another family's layout, with checkpoints that hold the fused tensor
    slices = {}
    for expert, weight in enumerate(tensor.unbind(0)):
        if kind != "gate_up_proj":
            slices[f"{prefix}.{expert}.{kind}.weight"] = weight
        else:
            gate, up = weight.chunk(2, dim=0)
            slices[f"{prefix}.{expert}.gate_proj.weight"] = gate
            slices[f"{prefix}.{expert}.up_proj.weight"] = up
    return slices
