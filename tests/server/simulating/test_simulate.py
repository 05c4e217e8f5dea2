"""The simulation bench: what it measures, what it plays, and that it plays the same thing twice."""

import json

import numpy as np
import pytest
from offramp.runtime.cli import main
from offramp.runtime.errors import InputError
from offramp.server.load.arrivals import Closed, Poisson, Trace, rate
from offramp.server.simulating.bank import Bank
from offramp.server.simulating.front import RequestCost
from offramp.server.simulating.laboratory import Laboratory, Measured
from offramp.server.simulating.play import Machine, Player
from offramp.server.simulating.simulate import simulate_bench
from offramp.server.simulating.times import Timed, fit

LINE = fit([Timed(rows, rows * 1e6, (0.001 + rows * 1e-4,) * 2) for rows in (1, 2, 64) for _ in range(3)])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "d.npz"
    np.savez(path, x=np.random.default_rng(5).normal(size=(200, 8)).astype(np.float32))
    return path


@pytest.fixture(scope="module")
def laboratory(rows, data):
    return Laboratory(rows, Bank(rows, data, ["full", "fast"]), "stages")


def player(laboratory, point="fast", cost=0.0, rows=1, queued=10_000, lanes=1, cores=8.0):
    """Every batch of every stage takes a millisecond and a tenth of one for each row."""
    way = laboratory.job(laboratory.bank.query(np.array([0]), point))[1]
    measured = Measured({(way, stage): LINE for stage in range(3)}, 1.0, 1.0, 1.0)
    return Player(laboratory, measured, Machine(lanes, cores, queued, RequestCost.of(cost)), point, rows)


def test_times_are_lines_between_what_was_timed():
    assert LINE.seconds(1, 1e6) == pytest.approx(0.0011)
    assert LINE.seconds(33, 33e6) == pytest.approx(0.0043)
    assert LINE.seconds(128, 128e6) == pytest.approx(2 * LINE.seconds(64, 64e6))


def test_more_flops_take_longer_where_that_was_seen_and_never_less():
    flops = np.array([1.0, 2.0, 3.0]) * 1e6
    longer = fit([Timed(4, each, (0.001 + each * 1e-9,)) for each in flops])
    assert longer.seconds(4, 10e6) == pytest.approx(0.011)
    shorter = fit([Timed(4, each, (0.01 - each * 1e-9,)) for each in flops])
    assert shorter.seconds(4, 10e6) == pytest.approx(shorter.seconds(4, 0.0)) == pytest.approx(0.008)


def test_a_request_that_meets_nobody_takes_its_batches_and_its_own_cost(laboratory):
    played = player(laboratory, "full", cost=0.003).open(np.array([0.0, 1.0]), warm=0.0, seconds=2.0, seed=0)
    assert played.latencies == pytest.approx(0.003 + 0.0011)
    assert played.refused == 0
    assert played.batch_rows == 1


def test_the_event_loop_does_one_thing_after_the_other(laboratory):
    played = player(laboratory, cost=0.01).closed(16, warm=0.5, seconds=2.0, seed=0)
    assert played.carried / played.seconds == pytest.approx(100, rel=0.02)
    assert played.event_loop > 0.95


def test_cores_are_shared_with_the_event_loop(laboratory):
    alone, shared = (player(laboratory, cost=0.01, cores=cores).closed(16, warm=0.5, seconds=2.0, seed=0)
                     for cores in (2.0, 1.0))  # fmt: skip
    assert shared.carried < 0.95 * alone.carried


def test_a_full_queue_refuses(laboratory):
    played = player(laboratory, rows=8, queued=8).open(np.zeros(50), warm=0.0, seconds=1.0, seed=0)
    assert played.refused > 0
    assert played.refused + len(played.latencies) == 50


def test_the_same_seed_plays_the_same(laboratory):
    arrivals = np.sort(np.random.default_rng(1).random(500))
    first, again = (player(laboratory).open(arrivals, warm=0.0, seconds=1.0, seed=3).latencies for _ in range(2))
    assert first.tolist() == again.tolist()


def test_batches_are_measured_through_the_ways_at_every_stage_that_rows_come_to(rows, data):
    bank = Bank(rows, data, ["full", "fast", "balanced"])
    measured = Laboratory(rows, bank, "stages").measure(list(bank.exits), 2, 2.0)
    assert {stage for _, stage in measured.times} == set(
        range(1 + max(bank.exits["balanced"].max(), bank.exits["fast"].max()))
    )
    assert all(times.seconds(8, 1e4) > 0 for times in measured.times.values())
    assert measured.demand > 0


def test_loads_are_simulated_at_every_point(rows_bundle, data, tmp_path):
    loads = [Closed(4), Poisson(share=0.3), Poisson(rate=200.0), Trace("t", (0.0, 0.1, 0.2))]
    found = simulate_bench(rows_bundle, data, loads=loads, lanes=4, seconds=1.0, request_ms=1.0)
    assert [line["point"] for line in found.times] == ["full", "balanced", "fast"] * 4
    for line in found.times:
        assert 0 < line["p50_ms"] <= line["p90_ms"] <= line["p99_ms"]
        assert line["refused"] == 0
    assert found.about["measured"]["request_ms"] == 1.0


def test_the_cost_of_a_request_is_measured_where_it_is_not_said(rows_bundle, data, tmp_path, capsys):
    out = tmp_path / "out.json"
    options = ["--simulate", "--operating-point", "fast", "--rate", "100rows", "--rows", "2", "--seconds", "1"]
    assert main(["bench", str(rows_bundle), str(data), *options, "--json", str(out)]) == 0
    assert "1 lane" in (text := capsys.readouterr().out) or "2 lanes" in text
    written = json.loads(out.read_text())
    assert written["measured"]["request_ms"] > 0
    assert written["times"][0]["rate"] == 50


def test_a_rate_may_be_of_rows():
    assert rate("3000rows", 4) == Poisson(rate=750.0)


def test_what_can_not_be_simulated_is_named(rows_bundle, data, capsys):
    with pytest.raises(InputError, match="lanes is -1, expected at least 1"):
        simulate_bench(rows_bundle, data, lanes=-1)
    with pytest.raises(InputError, match="batching is 'some', expected one of auto, graph, stages"):
        simulate_bench(rows_bundle, data, batching="some")
    for options, said in (
        (["--simulate", "--load"], "--load doesn't go with --simulate"),
        (["--lanes", "2"], "--lanes goes with --simulate"),
        (["--simulate", "--lanes", "0"], "lanes is 0, expected at least 1"),
        (["--simulate", "--operating-point", "quick"], "operating_point is 'quick'"),
    ):
        assert main(["bench", str(rows_bundle), str(data), *options]) == 2
        assert said in capsys.readouterr().err
