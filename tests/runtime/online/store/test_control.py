"""Engines agree on what to serve, one of them decides, and all that was decided is remembered."""

import threading
import time
from contextlib import suppress

import pytest
from kept_rows import CLASSES, opened, rows
from offramp.runtime.errors import InputError, NotLeader, StoreError
from offramp.runtime.online.store.control import Draft, State
from offramp.runtime.online.store.store import Store


def test_a_new_model_is_only_observed(where):
    with opened(where) as store:
        assert store.state() == State(0, "digest", "", 0, False, "observe")
        assert store.versions() == []
        assert store.decisions() == []


def test_a_decision_is_state_version_and_log_in_one(where):
    with opened(where) as store:
        lease = store.lease("recalibration", "one", 60)
        numbers = {"delta": -0.02, "rows": 2000, "why": None, "exits": [1, 2]}
        state = store.decide("swap", numbers, by=lease, draft=Draft("temperature", '{"t": 1.5}', in_force=True))
        assert (state.revision, state.calibration) == (1, 1)
        store.decide("proposal", {}, by=lease, draft=Draft("temperature", '{"t": 2}', in_force=False))
        store.decide("rollback", {}, by="anna", calibration=0, frozen=True)
    with opened(where) as again:
        assert again.state() == State(3, "digest", "", 0, True, "observe")
        assert [(v.version, v.parent, v.method, v.document) for v in again.versions()] == [
            (1, 0, "temperature", '{"t": 1.5}'),
            (2, 1, "temperature", '{"t": 2}'),
        ]
        log = again.decisions()
        assert [(d.revision, d.kind, d.by, d.token, d.version) for d in log] == [
            (1, "swap", "one", 1, 1),
            (2, "proposal", "one", 1, 2),
            (3, "rollback", "anna", None, None),
        ]
        assert log[0].numbers == numbers
        assert again.decisions(limit=1) == log[-1:]


def test_a_decision_that_cannot_be_leaves_nothing(where):
    with opened(where) as store:
        store.decide("freeze", {}, by="anna", frozen=True)
        draft = Draft("temperature", "{}", in_force=True)
        with pytest.raises(InputError, match="mode is 'loud'"):
            store.decide("mode", {}, by="anna", draft=draft, mode="loud")
        with pytest.raises(InputError, match="version is 3: there is none such"):
            store.decide("promote", {}, by="anna", calibration=3)
        with pytest.raises(InputError, match="numbers: "):
            store.decide("swap", {"x": float("nan")}, by="anna", draft=draft)
        with pytest.raises(InputError, match="no 'calibrations'"):
            store.decide("swap", {}, by="anna", calibrations=3)
        with pytest.raises(NotLeader, match="revision 1, not 0"):
            store.decide("swap", {}, by="anna", revision=0, draft=draft)
        assert store.state() == State(1, "digest", "", 0, True, "observe")
        assert store.versions() == []
        assert len(store.decisions()) == 1


def test_a_calibration_serves_only_the_bundle_that_it_was_made_for(where):
    with opened(where) as store:
        store.decide("swap", {}, by="anna", draft=Draft("temperature", "{}", in_force=True))
        with pytest.raises(InputError, match="version is 1: it belongs to another bundle"):
            store.decide("bundle", {}, by="anna", bundle="newer")
        assert store.decide("bundle", {}, by="anna", bundle="newer", calibration=0).bundle == "newer"


def test_models_in_one_database_know_nothing_of_each_other(where):
    names = [f"class {k}" for k in range(CLASSES)]
    with opened(where) as store, Store.open(where, model="x", bundle="d", exits=3, classes=names) as other:
        other.decide("freeze", {}, by="anna", frozen=True)
        assert store.state().revision == 0
        assert store.decisions() == []


def test_one_leads_and_the_other_takes_over_when_its_time_is_up(where):
    with opened(where) as first, opened(where) as second:
        lease = first.lease("recalibration", first.engine, 0.5)
        assert second.lease("recalibration", second.engine, 0.5) is None
        assert first.lease("recalibration", first.engine, 0.5).token == lease.token
        time.sleep(0.6)
        newer = second.lease("recalibration", second.engine, 60)
        assert newer.token > lease.token
        assert first.lease("recalibration", first.engine, 0.5) is None
        with pytest.raises(NotLeader, match="leads no more"):
            first.decide("swap", {}, by=lease, frozen=True)
        second.decide("swap", {}, by=newer, frozen=True)
        assert [decision.token for decision in first.decisions()] == [newer.token]


def test_a_lease_that_is_given_back_is_free_at_once(where):
    with opened(where) as first, opened(where) as second:
        lease = first.lease("recalibration", first.engine, 3600)
        first.release(lease)
        newer = second.lease("recalibration", second.engine, 60)
        assert newer.token == lease.token + 1
        first.release(lease)  # nobody else's
        assert first.lease("recalibration", first.engine, 60) is None
        assert second.lease("other", second.engine, 60).token == 1


def test_a_clock_that_was_set_back_gives_nobody_a_longer_lease(tmp_path, monkeypatch):
    with opened(tmp_path / "store.db") as first, opened(tmp_path / "store.db") as second:
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 1e6)
        first.lease("recalibration", first.engine, 60)
        monkeypatch.setattr(time, "time", lambda: now)
        assert second.lease("recalibration", second.engine, 60) is not None


def test_of_many_who_ask_at_once_one_leads_and_no_decision_is_made_twice(where):
    stores = [opened(where) for _ in range(4)]
    got, won, barrier = [], [], threading.Barrier(4)

    def compete(store: Store) -> None:
        barrier.wait()
        lease = store.lease("recalibration", store.engine, 60)
        got.append(lease)
        for revision in range(5):
            barrier.wait()
            with suppress(NotLeader):
                won.append(store.decide("swap", {}, by=lease or store.engine, revision=revision).revision)

    threads = [threading.Thread(target=compete, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(lease is not None for lease in got) == 1
    assert sorted(won) == [1, 2, 3, 4, 5]
    assert [decision.revision for decision in stores[0].decisions()] == [1, 2, 3, 4, 5]
    for store in stores:
        store.close()


@pytest.mark.parametrize("by", [None, 5, "", " ", "x" * 201, "a\0", "a\nb", "\ud800"])
def test_who_decides_has_a_name_that_can_be_read(tmp_path, by):
    with opened(tmp_path / "store.db") as store:
        with pytest.raises(InputError, match="by is"):
            store.decide("freeze", {}, by=by, frozen=True)
        assert store.decide("freeze", {}, by="Ada 猫", frozen=True).frozen


@pytest.mark.parametrize("changes", [{"calibration": 10**30}, {"frozen": "maybe"}, {"point": None}])
def test_what_the_database_cannot_take_is_refused_and_nothing_else_is_lost_for_it(where, changes):
    with opened(where, seconds=3600) as store:
        assert store.append(rows(["a", "b"]))  # they wait, and are written together with it
        with pytest.raises((StoreError, InputError)):
            store.decide("odd", {}, by="Ada", **changes)
        assert store.alarm is None
        assert store.feedback(["a", "b"], [0, 0], [1, 2]) == ["accepted"] * 2
        assert store.dropped == 0
        assert store.decisions() == []
