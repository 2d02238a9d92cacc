"""The metrics of updates."""

import numpy as np

from megatron_gspo.loop.optimizer_steps import averaged_metrics


def test_means_and_extremes_over_updates():
    records = [
        {"loss": 1.0, "ratio_max": 2.0, "ratio_min": 0.5, "entropy": 1.0},
        {"loss": 2.0, "ratio_max": 3.0},
    ]
    averaged = averaged_metrics(records)
    assert averaged == {"loss": 1.5, "ratio_max": 3.0, "ratio_min": 0.5, "entropy/updates": 1.0}
    assert np.isnan(averaged_metrics([{"loss": np.nan}, {"loss": 1.0}])["loss"])
