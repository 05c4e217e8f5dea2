"""The audit of records: figures, one page, a verdict with reasons, and clear refusals."""

import json
import re

import msgspec
import numpy as np
import pytest
from made_records import routed, saved
from offramp.runtime import Cascade, InputError, sample
from offramp.runtime.cli import main
from offramp.runtime.jobs.auditing.audit import audit_bundle, audit_records, describe, table
from offramp.runtime.jobs.recording.record import record
from offramp.runtime.records import read_index, write_index

QUICK = {"permutations": 200, "replicates": 200, "seeds": 2}


def write(folder, manifest="", **options):
    return saved(routed(**options), folder, manifest)


def test_only_exits_that_have_seen_routing_are_audited_by_their_own_numbers(tmp_path):
    found = audit_records(write(tmp_path / "r"), **QUICK)
    assert found.numbers == (1, 2)
    assert not found.yes
    assert re.search(r"No: at exit [12], which comes closest", found.verdict)
    assert found.verdict in describe(found)
    rows = table(found)
    assert [row["exit"] for row in rows] == [1, 2]
    assert rows[1]["gap_weighted"] == found.exits[1].best.permutation.observed.weighted
    assert all(np.ndim(value) == 0 for row in rows for value in row.values())


def test_routing_that_decides_who_is_right_gets_a_yes(tmp_path):
    found = audit_records(write(tmp_path / "r", rows=3000, decides=True, seen=((), (0, 1), (0, 1))), **QUICK)
    assert found.yes
    assert found.verdict.startswith("Yes: at exit 1")


def test_rows_can_be_kept_out(tmp_path):
    folder = write(tmp_path / "r")
    rows = np.arange(100, 500)
    some = audit_records(folder, rows=rows, **QUICK)
    counted = some.exits[0].best.permutation.observed
    assert (counted.low_rows + counted.high_rows).sum() <= 400
    assert describe(some) != describe(audit_records(folder, **QUICK))


def test_constant_routing_and_all_correct_are_an_honest_no(tmp_path):
    folder = write(tmp_path / "r")
    h = np.load(folder / "routing.npy")
    np.save(folder / "routing.npy", np.ones_like(h))
    constant = audit_records(folder, **QUICK)
    assert not constant.yes
    assert constant.exits[0].best.permutation.observed.shared_bins == 0
    np.save(folder / "routing.npy", h)
    np.save(folder / "labels.npy", np.load(folder / "logits_1.npy").argmax(axis=1))
    assert not audit_records(folder, **QUICK).yes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"routing": False}, "no routing outputs"),
        ({"labelled": False}, "no labels"),
        ({"rows": 19}, "at least 20 labelled rows, got 19"),
        ({"seen": None}, "doesn't say which exit has seen which routing"),
        ({"seen": ((), (0,), (2,))}, "doesn't fit its 2 layers"),
    ],
)
def test_records_that_cannot_be_audited_are_refused(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        audit_records(write(tmp_path / "r", **options), **QUICK)


@pytest.fixture
def audited(tmp_path):
    """A bundle that records claim to be of; it is never run."""
    with Cascade.load(sample.BUNDLE) as cascade:
        digest = cascade.manifest.digest
    return write(tmp_path / "r", manifest=digest, classes=10)


def test_the_folder_holds_the_figures_and_a_page_that_needs_no_network(audited, tmp_path):
    pytest.importorskip("matplotlib")
    found = audit_bundle(sample.BUNDLE, audited, tmp_path / "a", **QUICK)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["audit.html", "audit.json"]
    data = json.loads((tmp_path / "a" / "audit.json").read_text())
    assert data["verdict"] == found.verdict
    assert [one["exit"] for one in data["exits"]] == [1, 2]
    for one, exit_ in zip(data["exits"], found.exits, strict=True):
        assert one["missing"] == list(exit_.missing())
        for feature, seen in zip(one["features"], exit_.features, strict=True):
            assert feature["feature"] == seen.feature
            assert feature["permutation"]["observed"]["weighted"] == seen.permutation.observed.weighted
            assert feature["kernels"]["nll"] == seen.kernels.nll
    page = (tmp_path / "a" / "audit.html").read_text()
    assert found.verdict.split(",")[0] in page
    assert page.count("<svg") == page.count("<figcaption") >= 3
    assert "<script" not in page
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"', page)


def test_the_command_prints_the_verdict_and_refuses_in_one_line(audited, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    few = ["--permutations", "50", "--replicates", "50"]
    command = ["audit", str(sample.BUNDLE), str(audited), "--out", str(tmp_path / "a"), *few]
    assert main(command) == 0
    assert "No: at exit" in capsys.readouterr().out
    assert main([*command, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["yes"] is False
    assert main(command) == 2
    assert "already exists: choose another place, or replace it by --overwrite" in capsys.readouterr().err


def test_records_of_another_bundle_and_models_without_routing_are_refused(audited, tmp_path):
    index = read_index(audited)
    write_index(audited, msgspec.structs.replace(index, manifest="0" * 64))
    with pytest.raises(InputError, match="recorded from another bundle"):
        audit_bundle(sample.BUNDLE, audited, tmp_path / "a")
    x, y = sample.heldout()
    np.savez(tmp_path / "d.npz", x=x[:50], labels=y[:50])
    with Cascade.load(sample.BUNDLE) as cascade:
        record(cascade, tmp_path / "d.npz", tmp_path / "plain")
    with pytest.raises(InputError, match="no routing outputs, so there is nothing to audit"):
        audit_bundle(sample.BUNDLE, tmp_path / "plain", tmp_path / "a")
    assert not (tmp_path / "a").exists()
