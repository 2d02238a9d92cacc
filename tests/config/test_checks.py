"""Choices, layouts, models and files that cannot work."""

import copy
import json
from pathlib import Path

import pytest

from megatron_gspo.config import Config, ConfigError, ParallelConfig
from megatron_gspo.config.load import apply_overrides
from megatron_gspo.config.parallel_checks import check_divisibility
from megatron_gspo.config.rollout_checks import check_environment_file


def build(plain: dict, *overrides: str) -> Config:
    return Config.from_dict(apply_overrides(copy.deepcopy(plain), overrides))


def refused(plain: dict, *overrides: str, world_size: int | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        config = build(plain, *overrides)
        if world_size is not None:
            config.check(world_size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


SFT = ("algorithm.name=sft", "rollout.engine=sft", "rollout.n_samples_per_prompt=1",
       "training.global_batch_size=16")  # fmt: skip

ENVIRONMENT = "rollout.environment=examples/environments/spell_backward.py:spell_backward"


def test_every_algorithm_builds(plain: dict) -> None:
    for name in ("gspo", "gspo_token", "grpo", "dr_grpo", "dapo"):
        assert build(plain, f"algorithm.name={name}").algorithm.name == name
    assert build(plain, *SFT).algorithm.name == "sft"


def test_overrides_reach_the_objective(plain: dict) -> None:
    objective = build(
        plain, "algorithm.epsilon_low=0.01", "algorithm.advantage_std=population"
    ).algorithm
    assert (objective.epsilon_low, objective.epsilon_high, objective.advantage_std) == (
        0.01,
        4e-4,
        "population",
    )


@pytest.mark.parametrize(
    "overrides, key, fix",
    [
        (["algorithm.epsilon_low=0.2"], "algorithm.epsilon_low = 0.2: is outside the clip",
         "allow_nonstandard: true"),
        (
            ["algorithm.name=grpo", "algorithm.epsilon_high=4e-4"],
            "algorithm.epsilon_high = 0.0004:", "about 0.2"
        ),
        (["algorithm.loss_agg_mode=token-mean"], 'algorithm.loss_agg_mode = "token-mean":', "seq-mean-token-mean"),
        (["algorithm.name=sft"], 'rollout.engine = "embedded":', "set rollout.engine: sft"),
        (["rollout.engine=sft"], 'rollout.engine = "sft":', "set algorithm.name: sft"),
        ([*SFT, "rollout.n_samples_per_prompt=2"], "rollout.n_samples_per_prompt = 2:", "set it to 1"),
        ([*SFT, "algorithm.dynamic_sampling=true"], "algorithm.dynamic_sampling = ", "remove"),
        (["rollout.top_p=0.9"], "rollout.top_p = 0.9: training log-probs are", "set 1, or evaluation.top_p"),
        (["rollout.top_k=20"], "rollout.top_k = 20: training log-probs are", "set 0, or evaluation.top_k"),
        (["rollout.temperature=0"], "rollout.temperature = 0.0: greedy responses", "set it above 0"),
        (["evaluation.temperature=0", "evaluation.top_k=3"], "evaluation.top_k = 3: has no effect", "remove it"),
        (["evaluation.temperature=0", "evaluation.top_p=0.5"], "evaluation.top_p = 0.5: has no effect", "remove it"),
        (["rollout.n_samples_per_prompt=1"], "rollout.n_samples_per_prompt = 1:", "set it to 2 or more"),
        (
            ["algorithm.kl_loss_coef=0.1", "algorithm.kl_reward_coef=0.1"],
            "algorithm.kl_reward_coef = 0.1:", "set one of the two to 0"
        ),
        (["algorithm.truncated=penalize"], "algorithm.overlong_buffer_len = 0:", "set 1 to 64"),
        (
            ["algorithm.truncated=penalize", "algorithm.overlong_buffer_len=65"],
            "algorithm.overlong_buffer_len = 65:", "64"
        ),
        (["algorithm.overlong_buffer_len=8"], "algorithm.overlong_buffer_len = 8:", "truncated: penalize"),
        *(
            (
                [f"algorithm.{key}=token", "algorithm.old_log_probs=rollout"],
                f'algorithm.{key} = "token": compares the rollout\'s log-probs with themselves',
                "set algorithm.old_log_probs: recompute, or this to none",
            )
            for key in ("rollout_is", "rollout_rs")
        ),
        ([*SFT, "algorithm.rollout_is=token"], "algorithm.rollout_is =", "remove the key"),
        ([*SFT, "algorithm.rollout_rs=token"], 'algorithm.rollout_rs = "token": sft has no', "remove the key"),
        (["algorithm.rollout_is_threshold=3.0"], "algorithm.rollout_is_threshold = 3.0: has no effect", "token"),
        (
            ["algorithm.rollout_rs_threshold_lower=0.9"], "algorithm.rollout_rs_threshold_lower = 0.9: has no",
            "or sequence",
        ),
        (["algorithm.rollout_rs_threshold=1.1"], "algorithm.rollout_rs_threshold = 1.1: has no effect", "or sequence"),
        (["algorithm.rollout_rs=sequence"], "algorithm.rollout_rs_threshold = null: the ratio of a sequence", "1.001"),
        (["algorithm.rollout_is_threshold=0.5"], "algorithm.rollout_is_threshold = 0.5:", ">= 1"),
        (["algorithm.rollout_rs_threshold_lower=1.5"], "algorithm.rollout_rs_threshold_lower = 1.5:", "<= 1"),
        (["algorithm.rollout_rs_threshold=0.5"], "algorithm.rollout_rs_threshold = 0.5:", ">= 1"),
        (["rollout.max_turns=2"], "rollout.max_turns = 2: has no effect without rollout.environment", "set that"),
        (["rollout.max_turn_length=9"], "rollout.max_turn_length = 9: has no effect without", "remove this"),
        (["rollout.environment_options={a: 1}"], "rollout.environment_options = ", "remove this"),
        (["algorithm.turn_discount=0.5"], "algorithm.turn_discount = 0.5: has no effect without", "set that"),
        (["rollout.environment=shell"], 'rollout.environment = "shell": is not an environment', "file.py:factory"),
        (["rollout.environment=a-b:c"], 'rollout.environment = "a-b:c": is not an environment', "module:factory"),
        ([ENVIRONMENT, *SFT], "rollout.environment = ", "remove the key"),
        ([ENVIRONMENT, "data.verifier=exact_match"], 'data.verifier = "exact_match": has no effect', "remove one"),
        ([ENVIRONMENT, "rollout.oversampling=1.5"], "rollout.oversampling = 1.5:", "set it to 1"),
        (
            [ENVIRONMENT, "algorithm.turn_discount=0.5"],
            "algorithm.turn_discount = 0.5: gspo has one ratio and one advantage", "algorithm.name: gspo_token",
        ),
        (
            [ENVIRONMENT, "algorithm.name=gspo_token", "algorithm.turn_discount=1.5"],
            "algorithm.turn_discount = 1.5: is not allowed", "<= 1",
        ),
        (
            ["routing.replay=r2", "algorithm.old_log_probs=rollout"],
            'routing.replay = "r2": records the routes in the pass that algorithm.old_log_probs = rollout leaves out',
            "set it to r3, or algorithm.old_log_probs: recompute",
        ),
        ([*SFT, "routing.replay=r2"], 'routing.replay = "r2": sft has no old policy', "set it to none"),
        ([*SFT, "routing.replay=r3"], 'routing.replay = "r3": sft has no old policy', "set it to none"),
        (
            ["routing.missing_routes=live"],
            'routing.missing_routes = "live": has no effect with routing.replay = "none"', "r3",
        ),
        (
            ["routing.missing_routes=live", "routing.replay=r2"],
            'routing.missing_routes = "live": has no effect with routing.replay = "r2"',
            "set routing.replay: r3, or remove it",
        ),
        (
            ["routing.compare_rollout=true", "routing.metrics=false"],
            "routing.compare_rollout = true: has no effect with routing.metrics = false", "remove it"
        ),
        ([*SFT, "routing.compare_rollout=true"], "routing.compare_rollout = true: has no effect", "remove it"),
        (["data.task=null"], "data.prompts = null:", "set one"),
        (["data.prompts=x.jsonl"], 'data.prompts = "x.jsonl":', "set one"),
        (["data.task=null", "data.prompts=x", "data.verifier=reasoning_gym"], "data.verifier =", "data.task"),
        (["data.verifier=regex"], 'data.verifier = "regex":', "path/to/file.py:function"),
        (["data.verifier=rewards.py:2x"], "data.verifier =", "path/to/file.py:function"),
        (["data.verifier=a-b:c"], "data.verifier =", "package.module:function"),
        (["data.task=null", "data.prompts=x", "data.answer_key=null"], "data.answer_key = null:", "name"),
        (["data.prompt_template='Q:'"], "data.prompt_template =", "{question}"),
        (["data.system_prompt=Hi"], "data.system_prompt =", "data.chat_template: true"),
        (["parallel.virtual_pipeline_model_parallel_size=2"], "parallel.virtual_pipeline", "null"),
        (["parallel.sequence_parallel=true"], "parallel.sequence_parallel = true:", "null"),
        (
            ["parallel.overlap_param_gather=true"],
            "parallel.overlap_param_gather = true:", "overlap_grad_reduce: true"
        ),
        (["training.global_batch_size=48"], "training.global_batch_size = 48:", "divisor of 128"),
        (["model.recompute_num_layers=2"], "model.recompute_num_layers = 2:", "recompute_granularity: full"),
        (["optimizer.min_lr=1e-7"], "optimizer.min_lr = 1e-07:", "linear or cosine"),
        (["optimizer.min_lr=1.0", "optimizer.lr_decay_style=cosine"], "optimizer.min_lr = 1.0:", "lower it"),
        (["optimizer.lr_warmup_steps=13"], "optimizer.lr_warmup_steps = 13:", "lower it"),
        (["evaluation.eval_interval=1", "data.task.eval_size=0"], "evaluation.eval_interval = 1:", "data.eval_prompts"),
        (["evaluation.n_samples=4", "evaluation.temperature=0"], "evaluation.n_samples = 4:", "temperature"),
        (["evaluation.pass_at_k=[1, 4]"], "evaluation.pass_at_k = [1, 4]:", "n_samples"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_at_load(plain: dict, overrides: list[str], key: str, fix: str) -> None:
    message = refused(plain, *overrides)
    assert message.startswith(key), message
    assert fix in message.partition("; ")[2], message


def test_allow_nonstandard_lets_it_pass(plain: dict) -> None:
    config = build(plain, "algorithm.epsilon_low=0.2", "algorithm.allow_nonstandard=true")
    assert config.algorithm.epsilon_low == 0.2


def test_thresholds_of_rejection_sampling(plain: dict) -> None:
    def band(*overrides: str) -> tuple[float, float]:
        return build(plain, *(f"algorithm.rollout_rs{o}" for o in overrides)).algorithm.rollout_rs_band

    assert band("=token") == (0.5, 2.0)
    assert band("=token", "_threshold=4.0") == (0.25, 4.0)
    assert band("=token", "_threshold_lower=0.1") == (0.1, 2.0)
    assert band("=sequence", "_threshold=1.25", "_threshold_lower=0.9") == (0.9, 1.25)


def test_evaluation_samples_from_the_likeliest_tokens(plain: dict) -> None:
    evaluation = build(plain, "evaluation.top_p=0.9", "evaluation.top_k=20").evaluation
    assert (evaluation.top_p, evaluation.top_k) == (0.9, 20)


def test_turns_of_an_environment(plain: dict) -> None:
    for name in ("gspo_token", "grpo", "dapo", "dr_grpo"):
        config = build(plain, ENVIRONMENT, f"algorithm.name={name}", "algorithm.turn_discount=0.9")
        assert (config.algorithm.turn_discount, config.rollout.max_turns) == (0.9, 8)
    build(plain, ENVIRONMENT, "rollout.max_turns=2", "rollout.environment_options={tries: 2}")
    check_environment_file(build(plain, "rollout.environment=some.module:factory").rollout)
    with pytest.raises(ConfigError, match="rollout.environment = .*: no such file: missing.py; give its path"):
        check_environment_file(build(plain, "rollout.environment=missing.py:factory").rollout)


@pytest.mark.parametrize(
    "world_size, sizes, good",
    [
        # tp pp cp ep etp; dense needs tp*pp*cp | world, experts etp*ep*pp | world
        (8, (2, 2, 2, 4, 1), True),
        (8, (2, 1, 1, 8, 1), True),
        (8, (4, 2, 1, 2, 2), True),
        (4, (2, 2, 2, 1, 1), False),
        (6, (4, 1, 1, 1, 1), False),
        (8, (1, 2, 1, 8, 1), False),
        (8, (2, 1, 1, 4, 4), False),
    ],
)
def test_layout(plain: dict, world_size: int, sizes: tuple[int, ...], good: bool) -> None:
    names = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    overrides = [f"parallel.{name}_parallel_size={size}" for name, size in zip(names, sizes, strict=True)]
    if good:
        build(plain, *overrides).check(world_size)
    else:
        assert f"does not divide {world_size} processes" in refused(plain, *overrides, world_size=world_size)


def test_sizes_derived_from_a_layout() -> None:
    parallel = ParallelConfig(
        tensor_model_parallel_size=2, context_parallel_size=2, pipeline_model_parallel_size=2
    )
    assert parallel.data_parallel_size(16) == 2
    assert (parallel.use_sequence_parallel, parallel.expert_tensor_size) == (True, 1)
    assert (parallel.sequence_multiple, parallel.total_multiple) == (4, 8)
    assert (ParallelConfig().sequence_multiple, ParallelConfig().total_multiple) == (1, 1)


def test_longest_sequence_must_fit_the_budget(plain: dict) -> None:
    cp = "parallel.context_parallel_size=4"  # 32 + 63 = 95 tokens, padded to a multiple of 8: 96
    short = "rollout.max_response_length=63"
    build(plain, short, "training.max_tokens_per_micro_batch=95").check(4)
    assert "set at least 96" in refused(
        plain, cp, short, "training.max_tokens_per_micro_batch=95", world_size=4
    )
    build(plain, cp, short, "training.max_tokens_per_micro_batch=96").check(4)
    build(plain, cp, short, "training.max_tokens_per_micro_batch=1", "training.micro_batch_size=1").check(4)


def test_fixed_micro_batches_fill_every_rank(plain: dict) -> None:
    build(plain, "training.micro_batch_size=8").check(4)  # 32 sequences = 4 ranks x 8
    assert "set a multiple of 64" in refused(plain, "training.micro_batch_size=16", world_size=4)
    assert "set at least 64" in refused(plain, world_size=64)


def divisible(hf: dict, **sizes: int | bool) -> str | None:
    try:
        check_divisibility(ParallelConfig(**sizes), hf)
    except ConfigError as error:
        return error.key
    return None


def test_model_must_divide(hf_config: dict) -> None:
    assert divisible(hf_config, tensor_model_parallel_size=4) is None
    assert (
        divisible(hf_config, tensor_model_parallel_size=8) == "parallel.tensor_model_parallel_size"
    )  # 4 kv heads
    assert divisible(hf_config, pipeline_model_parallel_size=3) == "parallel.pipeline_model_parallel_size"
    assert divisible(hf_config, expert_model_parallel_size=3) == "parallel.expert_model_parallel_size"
    assert divisible(hf_config, expert_tensor_parallel_size=3) == "parallel.expert_tensor_parallel_size"
    virtual = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    assert divisible(hf_config, **virtual) is None
    assert (
        divisible({**hf_config, "num_hidden_layers": 6}, **virtual)
        == "parallel.virtual_pipeline_model_parallel_size"
    )
    no_sequence = {"tensor_model_parallel_size": 2, "sequence_parallel": False}
    assert divisible(hf_config, **no_sequence) == "parallel.sequence_parallel"


def test_dense_models(hf_config: dict) -> None:
    del hf_config["num_experts"]
    hf_config["intermediate_size"] = 100
    assert divisible(hf_config, tensor_model_parallel_size=4, sequence_parallel=False) is None
    hf_config["intermediate_size"] = 102
    assert divisible(hf_config, tensor_model_parallel_size=4) == "parallel.tensor_model_parallel_size"
    assert divisible(hf_config, expert_model_parallel_size=2) == "parallel.expert_model_parallel_size"
    assert divisible(hf_config, expert_tensor_parallel_size=2) == "parallel.expert_tensor_parallel_size"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("routing.replay=r2", 'routing.replay = "r2": the model has no experts; set it to none'),
        ("routing.replay=r3", 'routing.replay = "r3": the model has no experts; set it to none'),
        (
            "routing.compare_rollout=true",
            "routing.compare_rollout = true: the model has no experts; set it to false",
        ),
    ],
)
def test_a_dense_model_has_no_routes(plain: dict, tmp_path: Path, override: str, message: str) -> None:
    file = tmp_path / "model" / "config.json"
    build(plain, override).check(1)
    hf = json.loads(file.read_text())
    del hf["num_experts"]
    file.write_text(json.dumps({**hf, "model_type": "qwen3", "intermediate_size": 64}))
    assert refused(plain, override, world_size=1) == message


def test_routing_that_goes_together(plain: dict) -> None:
    for overrides in (
        ["routing.replay=r3", "algorithm.old_log_probs=rollout", "routing.missing_routes=live", "routing.storage=host"],
        ["routing.replay=r2", "routing.compare_rollout=true", "algorithm.name=grpo"],
        ["routing.replay=r2", "routing.metrics=false"],
    ):
        build(plain, *overrides).check(1)


def test_positions_of_the_model(plain: dict) -> None:
    build(plain, "rollout.max_response_length=96").check(1)
    assert "the model has 128 positions" in refused(plain, "rollout.max_response_length=97", world_size=1)


def test_model_directories(plain: dict, tmp_path: Path) -> None:
    assert "is not a directory" in refused(plain, f"model.path={tmp_path}/absent", world_size=1)
    assert "has no config.json" in refused(plain, f"model.path={tmp_path}", world_size=1)
    assert "no *.safetensors weights" in refused(plain, "model.init=pretrained", world_size=1)
    config_json = Path(plain["model"]["path"]) / "config.json"
    config_json.write_text('{"model_type": "gpt2"}')
    assert "use one of qwen3, qwen3_moe" in refused(plain, world_size=1)
    config_json.write_text("{")
    assert "is not JSON" in refused(plain, world_size=1)


def test_files_must_exist(plain: dict, tmp_path: Path) -> None:
    assert refused(plain, "data.eval_prompts=absent.jsonl", world_size=1).startswith("data.eval_prompts = ")
    assert "no such file" in refused(plain, f"data.verifier={tmp_path}/absent.py:score", world_size=1)
    (tmp_path / "rewards.py").write_text("def score(response, answer): return 1.0\n")
    build(plain, "data.verifier=package.rewards:score").check(1)  # found, or not, when it is loaded
    config = build(plain, f"data.verifier={tmp_path}/rewards.py:score")
    config.check(1)
    assert config.data.resolved_verifier.endswith("rewards.py:score")


def test_experts_under_the_name_that_transformers_5_writes(hf_config: dict) -> None:
    hf_config["num_local_experts"] = hf_config.pop("num_experts")
    assert divisible(hf_config, expert_model_parallel_size=2) is None
    assert divisible(hf_config, expert_model_parallel_size=3) == "parallel.expert_model_parallel_size"
