"""What waits is bounded, nobody who serves waits for the disk, and what can't be written is said while it lasts."""

import sqlite3
import threading
import time

import pytest
from kept_rows import opened, rows
from offramp.runtime.errors import InputError, StoreError
from offramp.runtime.online.online import Limits
from offramp.runtime.online.store.writer import Task, Writer


class Disk:
    """Takes tasks when it is told that it may; remembers what it took."""

    def __init__(self):
        self.taken, self.calls, self.broken = [], 0, None
        self.free = threading.Event()
        self.free.set()

    def write(self, tasks):
        self.calls += 1
        self.free.wait()
        if self.broken:
            raise self.broken
        self.taken += [task.work for task in tasks]
        return [task.work for task in tasks]


@pytest.fixture
def disk():
    return Disk()


def until(condition) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    pytest.fail("it never came true")


def writer(disk, **limits):
    return Writer(disk.write, **{"rows": 10, "bytes": 1000, "seconds": 3600.0, **limits})


def test_tasks_are_written_together_in_their_order(disk):
    with_ = writer(disk)
    for k in range(4):
        assert with_.put(Task(k, rows=1))
    assert disk.calls == 0
    with_.put(Task(4, rows=1))  # half of what may wait
    until(lambda: disk.taken)
    assert disk.taken == [0, 1, 2, 3, 4]
    with_.close()


def test_a_task_waits_no_longer_than_was_said(disk):
    with_ = writer(disk, seconds=0.05)
    with_.put(Task("a", rows=1))
    until(lambda: disk.taken == ["a"])
    with_.close()


def test_bytes_count_as_well_as_rows(disk):
    with_ = writer(disk)
    with_.put(Task("a", rows=1, bytes=600))
    until(lambda: disk.taken == ["a"])
    disk.free.clear()
    assert with_.put(Task("b", rows=1, bytes=1200))
    assert not with_.put(Task("c", rows=1, bytes=1))
    disk.free.set()
    with_.close()
    assert disk.taken == ["a", "b"]


def test_while_the_disk_hangs_no_more_than_the_bound_waits_and_nobody_is_held_up(disk):
    disk.free.clear()
    with_ = writer(disk)
    taken = [with_.put(Task(k, rows=2)) for k in range(50)]
    assert taken == [True] * 5 + [False] * 45
    assert with_.dropped == 90
    disk.free.set()
    with_.close()
    assert disk.taken == list(range(5))


def test_who_asks_for_it_now_gets_it_with_all_that_waits_before(disk):
    with_ = writer(disk)
    with_.put(Task("a", rows=1))
    assert with_.do("b") == "b"
    assert disk.taken == ["a", "b"]
    with_.close()


def test_an_alarm_lasts_as_long_as_its_reason_and_rows_wait_for_its_end(disk):
    disk.broken = StoreError("no room left")
    with_ = writer(disk)
    with_.put(Task("a", rows=1))
    with pytest.raises(StoreError, match="no room left"):
        with_.do("b")
    assert with_.alarm == "no room left"
    calls = disk.calls
    with pytest.raises(StoreError, match="no room left"):
        with_.do("c")  # at once, without another attempt
    assert disk.calls == calls
    assert with_.put(Task("d", rows=1))
    disk.broken = None
    until(lambda: with_.alarm is None)
    assert disk.taken == ["a", "d"]
    assert with_.dropped == 0
    with_.close()


def test_an_alarm_ends_by_itself_when_nobody_writes_any_more(disk):
    disk.broken = StoreError("no room left")
    with_ = writer(disk)
    with pytest.raises(StoreError):
        with_.do("a")
    disk.broken = None
    until(lambda: with_.alarm is None)
    with_.close()


def test_a_fault_of_ours_takes_its_tasks_with_it_and_not_the_writer(disk):
    disk.broken = ZeroDivisionError("oh")
    with_ = writer(disk)
    with pytest.raises(StoreError, match="oh"):
        with_.do("a", rows=3)
    assert with_.dropped == 3
    disk.broken = None
    assert with_.alarm is None
    assert with_.do("b") == "b"
    with_.close()


def test_closing_writes_what_waits_and_gives_up_what_cannot_be_written(disk):
    with_ = writer(disk)
    with_.put(Task("a", rows=1))
    with_.close()
    assert disk.taken == ["a"]
    assert not with_.put(Task("b", rows=1))
    disk.broken = StoreError("no room left")
    other = writer(disk)
    other.put(Task("c", rows=4))
    other.close()
    assert other.dropped == 4


def test_a_batch_that_is_larger_than_the_bound_is_kept_as_far_as_it_fits(tmp_path):
    with opened(tmp_path / "store.db", unflushed=8) as store:
        assert not store.append(rows([f"r{k}" for k in range(20)]))
        store.flush()
        assert len(store.window()) == 8
        assert store.dropped == 12


def test_durable_means_that_it_is_on_the_disk(tmp_path):
    with opened(tmp_path / "store.db", durable=True, seconds=3600) as store:
        assert store.append(rows(["a", "b"]))
        assert sqlite3.connect(tmp_path / "store.db").execute("SELECT count(*) FROM served").fetchall() == [(2,)]
        deeper = rows(["x"], left=2)
        assert store.complete(["a"], [0], deeper.score, deeper.logits)
        assert store.counts.completed == 1
        assert not store.append(rows(["c"], classes=9))  # refused
        assert store.append(rows([f"many {k}" for k in range(5000)]))


def test_a_locked_database_is_an_alarm_that_ends_with_the_lock(tmp_path):
    with opened(tmp_path / "store.db") as store:
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="another process holds it"):
            store.flush()
        assert "another process holds it" in store.alarm
        assert store.append(rows(["a"]))
        assert len(store.window()) == 0  # reading goes on
        other.execute("COMMIT")
        until(lambda: store.alarm is None)
        store.flush()
        assert len(store.window()) == 1


@pytest.mark.slow
def test_a_server_that_drops_its_connections_is_an_alarm_at_most_for_a_moment(server):
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(f"{server}/postgres", autocommit=True) as admin:
        admin.execute("CREATE DATABASE dropping")
        with opened(f"{server}/dropping") as store:
            for k in range(5):
                store.append(rows([f"r{k}"], time=float(k)))
                admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'dropping'")
                until(lambda: store.alarm is None)
                store.flush()
                assert len(store.window()) == k + 1


def test_a_durable_batch_that_cannot_be_written_is_dropped_and_those_beside_it_too(tmp_path):
    with opened(tmp_path / "store.db", durable=True) as store:
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        threads = [threading.Thread(target=store.append, args=(rows([f"r{k}"]),)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (store.dropped, store.counts.kept) == (4, 0)
        assert not store.append(rows(["later"]))
        assert store.dropped == 5
        other.execute("COMMIT")
        until(lambda: store.alarm is None)
        assert store.append(rows(["now"]))


@pytest.mark.parametrize("name", ["rows", "bytes", "unflushed", "unflushed_bytes", "days", "seconds"])
def test_limits_are_positive(name):
    with pytest.raises(InputError, match=f"{name} is 0"):
        Limits(**{name: 0})
