import numpy as np
import pytest
from offramp.runtime.errors import InputError
from offramp.runtime.online.alarms import Alarms, ShareAlarm, limits
from served_rows import made_up, served

BARS = (2.0, 2.0, -np.inf)


def ever(alarm, categories, step=100):
    return any(alarm.update(categories[i : i + step]) is not None for i in range(0, len(categories), step))


def false_alarms(streams, rows, alpha, step):
    """Shares that wander, but never on average beyond limits that they also touch."""
    random = np.random.default_rng(0)
    drift = 0.3 + 0.1 * np.cos(np.linspace(0, 40, rows))
    found = 0
    for k in range(streams):
        chance = np.full(rows, 0.3) if k % 2 else np.minimum(drift, 0.3)
        alarm = ShareAlarm("exit", [0.0, 0.0], [0.3, 1.0], alpha, every=500)
        found += ever(alarm, np.where(random.random(rows) < chance, 0, 1), step)
    return found / streams


def test_false_alarms_are_rare_over_a_whole_life():
    assert false_alarms(200, 2000, 0.1, 100) <= 0.1 + 3 * np.sqrt(0.09 / 200)


@pytest.mark.slow
def test_false_alarms_are_rare_over_long_lives():
    assert false_alarms(1000, 10_000, 0.05, 20) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 1000)


def test_what_begins_late_is_still_seen_soon():
    random = np.random.default_rng(0)
    alarm = ShareAlarm("exit", [0.45, 0.45], [0.55, 0.55], every=1000)
    assert not ever(alarm, random.integers(0, 2, 200_000), step=1000)
    late = (random.random(3000) < 0.35).astype(int)
    found = alarm.update(late)
    assert found is not None
    assert abs(found.share - 0.5) > 0.05
    assert found.rows < 5000
    assert f"exit {found.category}" in str(found)


def test_the_limits_hold_the_shares_that_a_reference_came_from():
    random = np.random.default_rng(0)
    shares = np.array([0.7, 0.29, 0.01])
    out = 0
    for _ in range(300):
        low, high = limits(random.multinomial(500, shares), 0.0, 0.1)
        out += not ((low <= shares) & (shares <= high)).all()
    assert out / 300 <= 0.1
    low, high = limits([50, 50], 0.02)
    assert (low + high) == pytest.approx(1)
    assert high[0] < 0.75


def stream(sharp, seed, rows=6000, **options):
    logits, label = made_up(rows, sharp=sharp, seed=seed)
    return served(logits, label, BARS, **options)


def test_nothing_new_raises_nothing_and_drift_is_seen_without_a_label():
    calm = Alarms.of(stream(1.0, 1))
    assert calm.update(stream(1.0, 2)) == []
    drifted = stream(2.0, 3, labelled=0.0, shadow=0.3)
    seen = {one.what for one in Alarms.of(stream(1.0, 1)).update(drifted)}
    assert {"exit", "score", "agreement"} <= seen
    assert "risk" not in seen


def test_a_broken_promise_and_a_fallen_coverage_are_told():
    reference = stream(1.0, 1)
    alarms = Alarms.of(reference, risk=0.2)
    assert alarms.update_one("risk", stream(1.0, 2)).what == "risk"
    abstaining = stream(1.0, 2, abstained=np.arange(6000) % 3 == 0)
    found = alarms.update_one("coverage", abstaining)
    assert found.share == pytest.approx(2 / 3, abs=0.01)
    with pytest.raises(InputError, match="what"):
        alarms.update_one("weather", reference)


def test_mistakes_are_named():
    with pytest.raises(InputError, match="low, high"):
        ShareAlarm("exit", [0.5], [0.4])
    with pytest.raises(InputError, match="counts"):
        limits([0, 0])
    with pytest.raises(InputError, match="every"):
        ShareAlarm("exit", [0.1], [0.4], every=0)
