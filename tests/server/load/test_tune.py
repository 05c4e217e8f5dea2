"""Which settings are tried, and what is said of them."""

import numpy as np
import pytest
from offramp.runtime.cli import main
from offramp.runtime.errors import InputError, OfframpError
from offramp.runtime.jobs.plain_json import to_json
from offramp.server.load.tune import Setting, Tuning, describe, document, settings_for, tune


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "d.npz"
    np.savez(path, x=np.random.default_rng(5).normal(size=(40, 8)).astype(np.float32))
    return path


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 16, 96])
def test_few_settings_are_tried_and_none_twice(cores):
    tried = settings_for(cores, graph=True)
    assert len(set(tried)) == len(tried) <= 8
    assert Setting(1, cores) in tried
    assert Setting(2, cores) in tried or cores == 1
    assert {one.batching for one in settings_for(cores, graph=False)} == {"auto"}


def test_settings_are_measured_at_all_loads_and_the_best_is_a_command_line(rows_bundle, data):
    # Who isn't answered in all of the time counts as an error: .2 s were too short for 64 where a core is slow.
    found = tune(
        rows_bundle, data, point="fast", seconds=0.8, turns=1, settings=[Setting(1, 1), Setting(2, 1, "stages")]
    )
    assert [(line["lanes"], line["batching"]) for line in found.times] == [(1, "auto"), (2, "stages")]
    for line in found.times:
        assert line["lone_p50_ms"] > 0
        assert line["errors"] == 0
        assert all(line[f"{name}_{load}"] > 0 for name in ("rows_per_second", "p99_ms") for load in (16, 64))
    assert max(line["rows_ratio"] for line in found.times) == 1
    text = describe(found, "bundle")
    if found.best is not None:
        assert f"offramp serve bundle --lanes {found.best.lanes} --threads 1 --batching" in text
        assert f"OFFRAMP_LANES={found.best.lanes} OFFRAMP_THREADS=1" in text
    assert b"offramp-tune/1" in to_json(document(found))


def test_no_setting_within_the_limit_is_said(rows_bundle, data):
    found = tune(rows_bundle, data, seconds=0.5, turns=1, settings=[Setting(1, 1)], p99_ms=1e-6)
    assert isinstance(found, Tuning)
    assert found.best is None
    assert "no setting is within that p99." in describe(found, "bundle")


def test_servers_that_answer_nothing_are_no_result(rows_bundle, data):
    with pytest.raises(OfframpError, match="no setting's server answered anything"):
        tune(rows_bundle, data, seconds=0.2, turns=1, settings=[Setting(1, 1)], rows=20_000)  # more than one may have


def test_what_can_not_be_tuned_is_named(rows_bundle, data, capsys):
    with pytest.raises(InputError, match="p99_ms is 0, expected more than 0"):
        tune(rows_bundle, data, p99_ms=0)
    for options, said in (
        (["--tune", "--threads", "2"], "--threads doesn't go with --tune"),
        (["--p99-ms", "5"], "--p99-ms goes with --tune"),
        (["--tune", "--operating-point", "fast", "--operating-point", "full"], "more than once"),
    ):
        assert main(["bench", str(rows_bundle), str(data), *options]) == 2
        assert said in capsys.readouterr().err
