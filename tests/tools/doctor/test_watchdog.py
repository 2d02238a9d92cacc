"""A stage that exceeds its limit is reported once."""

import threading
import time

from megatron_gspo.tools.doctor.watchdog import Watchdog


def test_a_late_stage_is_reported_once_with_its_limit():
    late, begun, reported = [], [], threading.Event()

    def on_late(name, seconds):
        late.append((name, seconds))
        reported.set()

    watch = Watchdog(on_late, begun.append)
    with watch.stage("quick", 60.0):
        pass
    with watch.stage("slow", 0.05):
        assert reported.wait(10.0)
        time.sleep(0.3)
    watch.close()
    assert (late, begun) == ([("slow", 0.05)], ["quick", "slow"])


def test_a_stage_that_has_ended_is_never_late():
    late = []
    watch = Watchdog(lambda name, seconds: late.append(name))
    with watch.stage("over", 0.05):
        pass
    time.sleep(0.3)
    watch.close()
    assert late == []
