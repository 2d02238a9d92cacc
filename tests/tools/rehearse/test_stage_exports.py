"""Metadata of the other stages' weights."""

from megatron_gspo.tools.rehearse.stage_exports import exports_of_stages

from .on_fake_gpu import on_fake_gpu
from .test_rehearse_rank import config


@on_fake_gpu
def test_every_stage_sends_its_own_layers() -> None:
    from megatron_gspo.mcore.megatron_options import MegatronOptions

    found = exports_of_stages(config(pipeline_model_parallel_size=2), MegatronOptions(), 1, 4)
    layers = [{layer for layer, _ in sections} for sections in found]
    assert layers == [{-1, 0}, {-2, 1}]


@on_fake_gpu
def test_one_stage_exchanges_nothing() -> None:
    from megatron_gspo.mcore.megatron_options import MegatronOptions

    assert exports_of_stages(config(), MegatronOptions(), 0, 4) == []
