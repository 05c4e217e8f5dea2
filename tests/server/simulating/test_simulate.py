"""The simulation bench: what it measures, what it plays, and that it plays the same thing twice."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from offramp.runtime.cli import main
from offramp.runtime.errors import InputError
from offramp.server.load.arrivals import Poisson, rate
from offramp.server.simulating.bank import Bank
from offramp.server.simulating.measure import measure
from offramp.server.simulating.play import Player
from offramp.server.simulating.played import played_way
from offramp.server.simulating.samples import BatchLine, Level, Moment, PointTimes, Series, fit_line
from offramp.server.simulating.simulate import simulate_bench

LINE = BatchLine(0.001, 0.0001, 0.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "d.npz"
    np.savez(path, x=np.random.default_rng(5).normal(size=(200, 8)).astype(np.float32))
    return path


def always(seconds):
    return Series([0.0], [seconds])


def level(rate=100.0, onward=0.0, back=0.0, woken=0.0, turned=0.0, ratio=1.0):
    ratios = (Series([0.0], [ratio], [1.0]),)
    return Level(rate, 1.0, always(onward), always(back), ratios, always(woken), always(turned))


def player(rows, data, point="fast", *, levels=None, requests=1, queued=10_000, lanes=1):
    """Every batch of every stage takes a millisecond and a tenth of one for each row, unless levels say otherwise."""
    times = PointTimes(1000.0, False, (LINE,), tuple(levels or [level()]))
    bank = Bank(rows, data, [point])
    way = played_way(rows, point, graph=False)
    exits = bank.exits[point].tolist()
    return Player(way, times, exits, bank.sizes, lanes=lanes, max_queued_rows=queued, rows=requests)


@given(
    st.tuples(*[st.floats(0, 1e-2)] * 3).filter(lambda line: sum(line) > 1e-6),
    st.lists(st.tuples(st.integers(1, 64), st.floats(0.1, 10)), min_size=8, max_size=30, unique_by=lambda x: x[0]),
)
def test_a_line_is_found_again_from_batches_that_lie_on_it(line, batches):
    count, flops = np.array(batches).T
    truth = BatchLine(*line)
    seconds = np.array([truth.seconds(n, f) for n, f in batches])
    found = fit_line(count, flops, seconds)
    assert [found.seconds(n, f) for n, f in batches] == pytest.approx(seconds.tolist(), rel=0.02)


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(1, 9), st.floats(1e-4, 1)), min_size=1, max_size=20))
def test_no_part_of_a_line_is_below_nothing(batches):
    found = fit_line(*np.array(batches, float).T)
    assert min(found.own, found.row, found.flop) >= 0


def test_a_moment_goes_through_the_record_in_its_order_and_starts_anew_at_its_end():
    series = Series([0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0])
    moment = Moment(1.5)
    assert [moment.next(series) for _ in range(4)] == [12.0, 13.0, 10.0, 11.0]


def test_of_the_next_samples_the_one_most_alike_is_taken():
    series = Series([0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [0.1, 5.0, 0.2])
    assert Moment(0.0).next(series, 4.0) == 2.0


def test_between_two_loads_samples_lie_between_what_has_their_rank_at_both():
    low, high = level(100.0), level(200.0)
    low = replace(low, onward=Series([0.0, 1.0, 2.0], [0.004, 0.001, 0.002]))
    high = replace(high, onward=Series([0.0, 1.0, 2.0], [0.009, 0.064, 0.002]))
    times = PointTimes(1.0, False, (LINE,), (low, high))
    assert times.at(50.0) is times.at(100.0) is low
    assert times.at(200.0) is times.at(900.0) is high
    order = [float(np.quantile([0.002, 0.009, 0.064], (k + 0.5) / 3)) for k in (2, 0, 1)]
    expected = [a**0.75 * b**0.25 for a, b in zip(low.onward.values, order, strict=True)]
    assert times.at(125.0).onward.values == pytest.approx(expected)
    assert len(times.at(175.0).onward) == 3


def test_a_request_that_meets_nobody_takes_its_ways_and_its_batch(rows, data):
    levels = [level(onward=0.003, back=0.002, woken=0.0005, ratio=2.0)]
    played = player(rows, data, "full", levels=levels).open(np.array([0.0, 1.0]), warm=0.0, seconds=2.0, seed=0)
    assert played.latencies == pytest.approx([0.003 + 0.0005 + 2 * 0.0011 + 0.002] * 2)
    assert played.refused == 0
    assert played.batch_rows == 1


def test_a_lane_that_goes_on_takes_its_turn_to_begin(rows, data):
    found = player(rows, data, "full", levels=[level(turned=0.01)])
    first, second = found.open(np.array([0.0, 0.0005]), warm=0.0, seconds=1.0, seed=0).latencies
    assert first == pytest.approx(0.0011)
    assert second == pytest.approx(0.0006 + 0.01 + 0.0011)


def test_lanes_run_batches_side_by_side(rows, data):
    arrivals = np.arange(0.0, 0.1, 0.0008)
    one, two = (
        player(rows, data, "full", lanes=n).open(arrivals, warm=0.0, seconds=1.0, seed=0).latencies for n in (1, 2)
    )
    assert two == pytest.approx(0.0011)
    assert one.mean() > 0.0012


def test_a_full_queue_refuses(rows, data):
    played = player(rows, data, requests=8, queued=8).open(np.zeros(50), warm=0.0, seconds=1.0, seed=0)
    assert played.refused > 0
    assert played.refused + len(played.latencies) == 50


def test_the_same_seed_plays_the_same(rows, data):
    arrivals = np.sort(np.random.default_rng(1).random(500))
    first, again = (player(rows, data).open(arrivals, warm=0.0, seconds=1.0, seed=3).latencies for _ in range(2))
    assert first.tolist() == again.tolist()
    assert len(first) == 500


def test_a_server_is_measured_by_its_own_record(rows_bundle, data):
    found = measure(rows_bundle, data, ["balanced"], ["--batching", "stages"], lanes=2, rows=1, seconds=2.0)["balanced"]
    rates = [one.rate for one in found.levels]
    assert rates == sorted(rates)
    assert rates[-1] == found.carried > 0
    assert not found.graph
    for one in found.levels:
        assert len(one.batches) == 2
        assert min(one.onward.values) > 0
        assert min(one.back.values) > 0
        assert min(one.woken.values) >= 0
        assert min(one.batches[0].values) > 0


def test_loads_are_simulated_at_every_point(rows_bundle, data, tmp_path, capsys):
    out, trace = tmp_path / "out.json", tmp_path / "t.txt"
    trace.write_text("0\n0.1\n0.2\n")
    options = ["--simulate", "--operating-point", "fast", "--rate", "100rows", "30%", "--connections", "4"]
    options += ["--trace", str(trace), "--rows", "2", "--seconds", "1", "--measured-seconds", "2", "--lanes", "1"]
    assert main(["bench", str(rows_bundle), str(data), *options, "--json", str(out)]) == 0
    assert "1 lane" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert [line["kind"] for line in written["times"]] == ["closed", "poisson", "poisson", "trace"]
    assert written["times"][1]["rate"] == 50
    (measured,) = written["measured"]["points"]
    assert written["times"][2]["rate"] == pytest.approx(0.3 * measured["requests_per_second"])
    for line in written["times"]:
        assert 0 < line["p50_ms"] <= line["p90_ms"] <= line["p99_ms"]
        assert line["refused"] == 0


def test_a_rate_may_be_of_rows():
    assert rate("3000rows", 4) == Poisson(rate=750.0)


def test_what_can_not_be_simulated_is_named(rows_bundle, data, capsys):
    with pytest.raises(InputError, match="lanes is -1, expected at least 1"):
        simulate_bench(rows_bundle, data, lanes=-1)
    with pytest.raises(InputError, match="batching is 'some', expected one of auto, graph, stages"):
        simulate_bench(rows_bundle, data, batching="some")
    with pytest.raises(InputError, match="measured_seconds is 0, expected more than 0"):
        simulate_bench(rows_bundle, data, measured_seconds=0)
    for options, said in (
        (["--simulate", "--load"], "--load doesn't go with --simulate"),
        (["--lanes", "2"], "--lanes goes with --simulate"),
        (["--simulate", "--lanes", "0"], "lanes is 0, expected at least 1"),
        (["--simulate", "--operating-point", "quick"], "operating_point is 'quick'"),
    ):
        assert main(["bench", str(rows_bundle), str(data), *options]) == 2
        assert said in capsys.readouterr().err
