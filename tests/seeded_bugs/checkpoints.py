"""Bugs of checkpoints, resume and the draws that a resumed run repeats."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

CHECKPOINTS = (
    SeededBug(
        name="every step samples with the same seed",
        file="megatron_gspo/loop/generation.py",
        before="np.random.SeedSequence([seed, step])",
        after="np.random.SeedSequence([seed])",
        test="tests/loop/test_generation.py::test_every_step_of_every_run_has_a_sampling_seed_of_its_own",
    ),
    SeededBug(
        name="all prompts are sampled with the same random numbers",
        file="megatron_gspo/rollout/embedded/token_sampling.py",
        before="sample & _WORD, prompt & _WORD, prompt >> _HALF",
        after="sample & _WORD, prompt * 0, prompt * 0",
        test="tests/rollout/embedded/test_token_sampling.py::test_uniforms_depend_on_seed_prompt_sample_and_position_alone",
    ),
    SeededBug(
        name="a resumed run reads its prompts from the beginning",
        file="megatron_gspo/loop/checkpoints.py",
        before="LoopState(**load_checkpoint(policy, checkpoint))",
        after="LoopState(**{**load_checkpoint(policy, checkpoint), 'cursor': 0})",
        test="tests/train/test_run.py::test_a_resumed_run_ends_the_same",
    ),
    SeededBug(
        name="only the rank that got the signal stops",
        file="megatron_gspo/loop/stop_signal.py",
        before="dist.all_reduce(flag, op=dist.ReduceOp.MAX)",
        after="pass",
        test="tests/loop/test_stop_signal.py::test_all_ranks_give_the_same_answer",
    ),
    SeededBug(
        name="a resumed run loses Adam's state",
        file="megatron_gspo/mcore/checkpoint/owned_state.py",
        before="for name, values in state.tensors.items()",
        after="for name, values in ()",
        test="tests/mcore/checkpoint/test_save_load.py::test_resumes_without_the_distributed_optimizer",
    ),
    SeededBug(
        name="a checkpoint holds what the previous one did",
        file="megatron_gspo/mcore/checkpoint/save_load.py",
        before="image.copy()",
        after="pass",
        test="tests/mcore/checkpoint/test_save_load.py::test_resumes_without_the_distributed_optimizer",
    ),
    SeededBug(
        name="a loaded rank keeps its old copy of what others read",
        file="megatron_gspo/mcore/checkpoint/save_load.py",
        before="model.gather_weights(always=True)",
        after="pass",
        test="tests/mcore/checkpoint/test_megatron_format.py::test_earlier_checkpoints_are_loaded",
    ),
    SeededBug(
        name="a data-parallel rank writes another one's share",
        file="megatron_gspo/mcore/checkpoint/owned_state.py",
        before="numel() * copy // copies\n            stop = parameter.numel() * (copy + 1)",
        after="numel() * (copies - 1) // copies\n            stop = parameter.numel() * copies",
        test="tests/mcore/checkpoint/test_owned_state.py::test_the_ranks_divide_everything",
    ),
    SeededBug(
        name="a shard that no rank wrote is not missed",
        file="megatron_gspo/mcore/checkpoint/metadata_file.py",
        before="len(wholes) > 1 or stored != math.prod(tensor_parts[0].whole)",
        after="len(wholes) > 1",
        test="tests/mcore/checkpoint/test_metadata_file.py::test_a_shard_that_is_missing_or_written_twice_is_refused",
    ),
    SeededBug(
        name="a half-written checkpoint is taken for a whole one",
        file="megatron_gspo/mcore/checkpoint/checkpoint_files.py",
        before="if file.stat().st_size != size:",
        after="if file.stat().st_size == 0 < size:",
        test="tests/mcore/checkpoint/test_checkpoint_files.py::test_a_damaged_checkpoint_is_passed_over_and_named",
    ),
    SeededBug(
        name="a killed run's writers and the next run's share a directory",
        file="megatron_gspo/mcore/checkpoint/checkpoint_files.py",
        before=".partial_{step:06d}_{uuid.uuid4().hex[:8]}",
        after=".partial_{step:06d}_00000000",
        test="tests/mcore/checkpoint/test_checkpoint_files.py::test_a_killed_save_leaves_nothing_that_counts",
    ),
    SeededBug(
        name="joint norm: checkpoints have one rank's part",
        file="megatron_gspo/mcore/joint_norms.py",
        before="{'weight': 0}",
        after="{}",
        test="tests/mcore/checkpoint/test_checkpoint_metadata.py::test_norms_over_all_heads_are_cut_like_their_heads",
    ),
)
