"""Open after three failures in a row; one call may try when ten seconds are over."""

from megatron_gspo.rewards.sandbox.circuit_breaker import CircuitBreaker


def test_opens_tries_and_closes():
    now = [0.0]
    breaker = CircuitBreaker(3, 10.0, clock=lambda: now[0])
    for succeeded in (False, False, True, False, False):
        breaker.record(succeeded)
        assert breaker.allows()
    breaker.record(False)
    assert not breaker.allows()
    now[0] = 9.9
    assert not breaker.allows()
    now[0] = 10.0
    assert breaker.allows()
    assert not breaker.allows()  # one call alone
    breaker.record(False)
    now[0] = 19.9
    assert not breaker.allows()
    now[0] = 20.0
    assert breaker.allows()
    breaker.record(True)
    assert breaker.allows() and breaker.allows()
