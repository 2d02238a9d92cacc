"""An optimizer of the user's own: the example against its formula, trained, resharded and resumed
as Adam is, and what is refused before a run begins.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_gspo.algorithms import preset
from megatron_gspo.config import OptimizerConfig, ParallelConfig
from megatron_gspo.config.training_sections import CriticConfig
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.checkpoint.read_pieces import read_steps
from megatron_gspo.mcore.checkpoint.save_load import (
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from megatron_gspo.mcore.policy import Policy, build_policy
from megatron_gspo.mcore.train_step import train_mini_batch
from megatron_gspo.mcore.user_optimizer import check_user_optimizer
from megatron_gspo.user_code import UserCodeError, load_user_function
from tests.equivalence.cases import make_samples, max_difference
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model

EXAMPLE = f"{Path(__file__).parents[2]}/examples/own_code/optimizer.py:ademamix"
LR = 1e-3
# as in the equivalence suite, of the size of a gradient's entries
SECTION = adam(
    LR,
    weight_decay=0.1,
    adam_eps=2e-4,
    lr_warmup_steps=2,
    function=EXAMPLE,
    options={"slow_beta": 0.99},
)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("models") / "moe", num_experts=4))


def test_the_example_by_its_formula():
    """Two steps with a state of zeros: the means are weighted sums of the gradients."""
    make = load_user_function("optimizer.function", EXAMPLE)
    weight = torch.nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64))
    group = {"params": [weight], "lr": 0.1, "weight_decay": 0.5}
    optimizer = make([group], replace(SECTION, adam_eps=0.25), slow_beta=0.75, alpha=2.0)
    expected = weight.detach().clone()
    first, second = torch.tensor([[0.5, -2.0], [1.5, 1.0]], dtype=torch.float64)
    for step, gradient in enumerate((first, second), start=1):
        weight.grad = gradient
        optimizer.step()
        fast = (0.1 * first, 0.1 * (0.9 * first + second))[step - 1] / (1 - 0.9**step)
        slow = (0.25 * first, 0.25 * (0.75 * first + second))[step - 1]
        square = (0.001 * first**2, 0.001 * (0.999 * first**2 + second**2))[step - 1]
        size = (square / (1 - 0.999**step)).sqrt() + 0.25
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * (fast + 2 * slow) / size
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=0)


def policy_in(path: str, layout: ParallelConfig, section: OptimizerConfig = SECTION) -> Policy:
    return build_policy(model_config(path), layout, groups_of(layout), optimizer=section)


def train(policy: Policy, seed: int) -> dict[str, Tensor]:
    batch = TrainingBatch.of(make_samples(seed, count=4))
    train_mini_batch(policy, batch, preset("sft"), micro_batches_of(64), temperature=1.0)
    return {name: value.clone() for name, value in policy.weights()}


def train_save_and_go_on(
    rank: int, world_size: int, path: str, layout: ParallelConfig, folder: str
) -> dict[str, Any]:
    """Two steps and a checkpoint; the third without interruption, and resumed."""
    policy = policy_in(path, layout)
    train(policy, seed=0)
    result: dict[str, Any] = {"saved": train(policy, seed=1)}
    at = save_checkpoint(policy, Path(folder), 2, {}, keep=1)
    result["after"] = train(policy, seed=2)
    resumed = policy_in(path, layout)
    load_checkpoint(resumed, at)
    result |= {"resumed": train(resumed, seed=2), "at": at}
    return result if rank == 0 else {}


def resume(
    rank: int, world_size: int, path: str, layout: ParallelConfig, at: Path
) -> dict[str, Any]:
    policy = policy_in(path, layout)
    load_checkpoint(policy, at)
    loaded = {name: value.clone() for name, value in policy.weights()}
    result = {"loaded": loaded, "after": train(policy, seed=2)}
    return result if rank == 0 else {}


LAYOUTS = {
    "data": parallel(),
    "tensor and experts": parallel(tensor=2, expert=2),
    "stages": parallel(pipeline=2, use_distributed_optimizer=False),
}


@pytest.fixture(scope="module")
def alone(path, tmp_path_factory) -> dict[str, Any]:
    """The run of one process."""
    folder = str(tmp_path_factory.mktemp("alone"))
    return run_distributed(train_save_and_go_on, 1, path, parallel(), folder)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_as_one_process_and_resumes(path, tmp_path, alone, layout):
    ranks = run_distributed(train_save_and_go_on, 2, path, LAYOUTS[layout], str(tmp_path))
    assert max_difference(ranks[0]["resumed"], ranks[0]["after"]) == 0
    # up to the order of float32 sums
    assert max_difference(ranks[0]["after"], alone["after"]) < LR / 100
    # its checkpoint in one process, and that of one process here
    there = run_distributed(resume, 1, path, parallel(), ranks[0]["at"])[0]
    here = run_distributed(resume, 2, path, LAYOUTS[layout], alone["at"])[0]
    assert max_difference(there["loaded"], ranks[0]["saved"]) == 0
    assert max_difference(here["loaded"], alone["saved"]) == 0
    assert max_difference(there["after"], ranks[0]["after"]) < LR / 100
    assert max_difference(here["after"], alone["after"]) < LR / 100


def resume_alone_and_with_adam(rank: int, world_size: int, path: str, at: Path) -> tuple[Any, str]:
    policy = policy_in(path, parallel())
    load_checkpoint(policy, at)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(policy_in(path, parallel(), adam(LR)), at)
    return train(policy, seed=2), str(error.value)


def test_a_checkpoint_has_the_state_under_its_own_names(path, alone):
    after, message = run_distributed(resume_alone_and_with_adam, 1, path, alone["at"])[0]
    assert max_difference(after, alone["after"]) == 0
    assert max_difference(alone["after"], alone["saved"]) > LR / 10
    assert read_steps(alone["at"]) == {"optimizer": 2, "schedule": 2}
    assert "(it has no optimizer.state.exp_avg" in message and "optimizer.function as" in message


SOURCE = """
import torch
from torch.optim import SGD, Adam, Optimizer

class Own(Optimizer):
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(group, parameter, self.state[parameter], parameter.grad)

def adam(groups, settings):
    return Adam(groups, settings.lr)

def momentum(groups, settings, nesterov=False):
    return SGD(groups, settings.lr, momentum=settings.adam_beta1, nesterov=nesterov)

def number(groups, settings):
    return 1.0

def first_group(groups, settings):
    return SGD(groups[:1], settings.lr)

class Idle(Own):
    def update(self, group, parameter, state, gradient):
        pass

class Infinite(Own):
    def update(self, group, parameter, state, gradient):
        parameter.data.div_(0)

class Rows(Own):
    def update(self, group, parameter, state, gradient):
        state["rows"] = gradient.square().mean(-1)
        parameter.data.sub_(gradient)

class Main(Own):
    def update(self, group, parameter, state, gradient):
        state["param"] = parameter.clone()
        parameter.data.sub_(gradient)

class Norms(Own):
    def update(self, group, parameter, state, gradient):
        state["norm"] = gradient.norm()
        parameter.data.sub_(gradient)

class Hidden(Own):
    steps = 0

    def update(self, group, parameter, state, gradient):
        self.steps += 1
        parameter.data.sub_(gradient / self.steps)

class InGroups(Own):
    def update(self, group, parameter, state, gradient):
        group["k"] = group.get("k", 0) + 1
        parameter.data.sub_(gradient / group["k"])

class Normalised(Own):
    def update(self, group, parameter, state, gradient):
        parameter.data.sub_(gradient / gradient.norm())

class Overall(Own):
    def update(self, group, parameter, state, gradient):
        last = self.param_groups[-1]["params"][-1].grad
        parameter.data.sub_(gradient / last.abs().max())
"""
CLASSES = (
    "Idle",
    "Infinite",
    "Rows",
    "Main",
    "Norms",
    "Hidden",
    "InGroups",
    "Normalised",
    "Overall",
)
WHOLE = parallel(use_distributed_optimizer=False, expert=2, pipeline=2)


@pytest.fixture(scope="module")
def own_file(tmp_path_factory) -> str:
    made = "\n".join(
        f"{name.lower()} = lambda groups, settings: {name}(groups, {{}})" for name in CLASSES
    )
    file = tmp_path_factory.mktemp("own") / "mine.py"
    file.write_text(SOURCE + made)
    return str(file)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("number", "returned a float: return a torch.optim.Optimizer"),
        ("first_group", "returned an optimizer of other groups"),
        ("idle", "left a parameter as it was"),
        ("infinite", "made NaN or infinity"),
        (
            "rows",
            "state 'rows' of a parameter [4, 6] is [4]: keep tensors of the parameter's shape",
        ),
        ("main", "'param' names main weights"),
        ("norms", "the parameters have other numbers"),
        ("hidden", "a resumed optimizer takes another step"),
        ("ingroups", "a resumed optimizer takes another step"),
        ("normalised", "depends on other elements, and ranks hold parts of a parameter: set"),
        ("overall", "depends on other parameters, which may be on other ranks"),
        ("absent", "has no 'absent'; define it or correct the name"),
    ],
)
def test_what_a_run_refuses_at_its_start(own_file: str, function: str, words: str):
    given = f"{own_file}:{function}"
    with pytest.raises(UserCodeError) as error:
        check_user_optimizer(replace(SECTION, function=given, options={}), parallel())
    message = str(error.value)
    assert message.startswith(f"optimizer.function = '{given}': ") and words in message
    assert "\n" not in message


def test_what_a_run_takes(own_file: str):
    check_user_optimizer(SECTION, parallel())
    check_user_optimizer(replace(SECTION, function=f"{own_file}:normalised", options={}), WHOLE)
    for name in ("adam", "momentum"):
        check_user_optimizer(
            replace(SECTION, function=f"{own_file}:{name}", options={}), parallel()
        )
    section = CriticConfig(function=f"{own_file}:momentum", options={"nesterov": 1, "width": 2})
    with pytest.raises(UserCodeError, match=r"^critic.function = .* unexpected keyword .*'width'"):
        check_user_optimizer(section, parallel())
