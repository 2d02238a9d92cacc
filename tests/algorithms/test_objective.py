import ast
import dataclasses
import inspect
import itertools
import textwrap

from megatron_gspo.algorithms import Objective


def test_defaults_of_every_field():
    values = dataclasses.asdict(Objective("mine", "none", "token-mean"))
    assert values == {
        "name": "mine",
        "importance_sampling_level": "none",
        "loss_agg_mode": "token-mean",
        "loss_scale_factor": None,
        "surrogate": "clip",
        "surrogate_options": {},
        "epsilon_low": None,
        "epsilon_high": None,
        "max_weight": None,
        "min_weight": None,
        "tau_pos": None,
        "tau_neg": None,
        "divergence_threshold": None,
        "dual_clip": None,
        "off_policy_mask_threshold": None,
        "log_ratio_coef": 0.0,
        "kl_loss_coef": 0.0,
        "kl_loss_type": "k3",
        "unbiased_kl": False,
        "entropy_coef": 0.0,
        "max_log_ratio": 20.0,
        "advantage_estimator": "group",
        "advantage_options": {},
        "gamma": 1.0,
        "lam": 1.0,
        "advantage_std": "sample",
        "advantage_baseline": "mean",
        "allow_nonstandard": False,
    }


def test_every_field_has_a_docstring():
    """The reference of config keys is generated from them."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(Objective)))
    body = tree.body[0].body
    documented = [
        field.target.id
        for field, doc in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value.value, str)
    ]
    assert documented == [f.name for f in dataclasses.fields(Objective)]
