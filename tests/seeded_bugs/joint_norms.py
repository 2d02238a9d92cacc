"""Bugs of norms over all tensor-parallel ranks' heads, and of MiniMax-M2's names and facts."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

NORMS, FAMILY = "megatron_gspo/mcore/joint_norms.py", "megatron_gspo/models/minimax.py"
PARTS = ("tests/mcore/test_joint_norms.py::test_ranks_have_parts_of_one_norm",)
HEADS = ("tests/mcore/test_joint_norms.py::test_heads_share_a_mean_and_the_weight_counts_as_a_part",)
FACTS = ("tests/models/test_minimax.py::test_facts_of_the_published_model",)
NAMES = ("tests/models/test_minimax.py::test_names_in_transformers_models",)

JOINT_NORMS = (
    SeededBug(
        "joint norm: the mean square of a tensor-parallel rank's own heads", "several trainers", NORMS,
        "_summed(torch.linalg.vecdot(wide, wide), group)", "torch.linalg.vecdot(wide, wide).mul_(group.size())", PARTS,
    ),
    SeededBug(
        "joint norm: a gradient without the other ranks' heads", "design", NORMS,
        "along = _summed(torch.mv(product, scale), ctx.group)", "along = torch.mv(product, scale)", PARTS,
    ),
    SeededBug(
        "joint norm: divided by the width of one rank", "design", NORMS,
        "x.shape[-1] * group.size()", "x.shape[-1]", PARTS,
    ),
    SeededBug(
        "joint norm: each head by itself", "several engines", NORMS,
        "joint_rms_norm(x.reshape(-1, len(self.weight)), self.weight, self.eps, self.group).view(x.shape)",
        "joint_rms_norm(x.flatten(0, -2), self.weight[: x.shape[-1]], self.eps, self.group).view(x.shape)", HEADS,
    ),
    SeededBug(
        "joint norm: its weight counted once for all tensor-parallel ranks", "design", NORMS,
        "weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1",
        "weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = False, -1, 1", HEADS,
    ),
    SeededBug(
        "joint norm: Megatron sums the ranks' gradients of their parts", "design", "megatron_gspo/mcore/mixers.py",
        "dict(qk_layernorm=False)", "dict(qk_layernorm=True)",
        ("tests/mcore/test_mixers.py::test_joint_norms_are_not_megatrons_norms_of_one_head",),
    ),
    SeededBug(
        "joint norm: checkpoints have one rank's part", "design", NORMS, '{"weight": 0}', "{}",
        ("tests/mcore/checkpoint/test_checkpoint_metadata.py::test_norms_over_all_heads_are_cut_like_their_heads",),
    ),
    SeededBug(
        "MiniMax-M2: gate and up projection exchanged", "several converters", FAMILY,
        '(".w1.", ".gate_proj."), (".w3.", ".up_proj.")', '(".w3.", ".gate_proj."), (".w1.", ".up_proj.")', NAMES,
    ),
    SeededBug(
        "MiniMax-M2: whole heads rotated", "several engines", FAMILY,
        "rotary_of(config, _rotated(config, shape.head_dim))", "rotary_of(config, shape.head_dim)", FACTS,
    ),
    SeededBug(
        "MiniMax-M2: modules of multi-token prediction are extra tensors", "several converters",
        "megatron_gspo/models/config_reader.py", '("num_nextn_predict_layers", "num_mtp_modules")',
        '("num_nextn_predict_layers",)', FACTS,
    ),
)  # fmt: skip
