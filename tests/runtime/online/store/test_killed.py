"""Killed at any moment, a store opens again; what was acknowledged is there, and at most the bound is lost."""

import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from typing import Any, TextIO

import pytest
from kept_rows import opened, rows
from offramp.runtime.errors import NotLeader
from offramp.runtime.online.store.control import Draft
from offramp.runtime.online.store.store import Store

UNFLUSHED = 16


class Child:
    """Work in another process, which says what it did, until it is killed."""

    def __init__(self, work: Callable[[TextIO], Any]) -> None:
        reading, writing = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            os.close(reading)
            try:
                with os.fdopen(writing, "w", buffering=1) as out:
                    work(out)
            finally:
                os._exit(1)
        os.close(writing)
        self.said = os.fdopen(reading)

    def kill(self) -> list[list[str]]:
        """kill -9; the words of each line that it had said."""
        os.kill(self.process, signal.SIGKILL)
        with self.said:
            lines = self.said.read().splitlines(keepends=True)
        os.waitpid(self.process, 0)
        return [line.split() for line in lines if line.endswith("\n")]


def serve(where: str, run: int, out: TextIO) -> None:
    """Append, label and swap for ever, and say each once it is done."""
    store = opened(where, unflushed=UNFLUSHED, seconds=0.01, rows=400)
    lease = store.lease("recalibration", store.engine, 60) or "a person"
    out.write("open\n")
    for k in range(10**9):
        while not store.append(rows([f"{run}-{k}"], time=1e9 + run)):
            time.sleep(0.001)
        out.write(f"row {k}\n")
        if k % 7 == 3:
            (outcome,) = store.feedback([f"{run}-{k}"], [0], [k % 5])
            out.write(f"label {k} {outcome}\n")
        if k % 11 == 5:
            state = store.decide("swap", {"k": k}, by=lease, draft=Draft("temperature", f'{{"k": {k}}}', in_force=True))
            out.write(f"swap {state.revision} {state.calibration}\n")


def check(store: Store, run: int, said: list[list[str]]) -> None:
    """Everything acknowledged is there, but for the last rows; and the history tells one story."""
    log, versions, state = store.decisions(10**6), store.versions(), store.state()
    assert [decision.revision for decision in log] == list(range(1, len(log) + 1))
    assert [version.version for version in versions] == list(range(1, len(versions) + 1))
    assert [decision.version for decision in log] == [version.version for version in versions]
    assert [version.parent for version in versions] == list(range(len(versions)))
    assert (state.revision, state.calibration) == (len(log), len(versions))
    swaps = [int(words[1]) for words in said if words[0] == "swap"]
    assert state.revision >= max(swaps, default=0)

    window = store.window(since=1e9 + run, limit=10**6)
    appended = 1 + max((int(words[1]) for words in said if words[0] == "row"), default=-1)
    labelled = {int(words[1]): int(words[1]) % 5 for words in said if words[0] == "label" and words[2] == "accepted"}
    asked = range(appended)
    found = store.feedback([f"{run}-{k}" for k in asked], [0] * appended, [labelled.get(k, k % 5) for k in asked])
    lost = [k for k in asked if found[k] == "unknown"]
    assert len(lost) <= UNFLUSHED
    assert lost == list(range(appended - len(lost), appended))
    assert not set(labelled) & set(lost)
    assert all(found[k] in ("duplicate", "late") for k in labelled)
    assert len(window) <= 400


def kill_often(where: str, times: int) -> None:
    moment = random.Random(7)
    for run in range(times):
        child = Child(lambda out, run=run: serve(where, run, out))
        if moment.random() < 0.8:  # else while it opens
            assert child.said.readline() == "open\n"
        time.sleep(moment.random() * 0.1)
        said = child.kill()
        with opened(where, rows=400) as store:
            check(store, run, said)
        if "://" not in where:
            connection = sqlite3.connect(where)
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            there = "SELECT count(*), sum(length(exits) + length(request)) FROM served"
            counted = connection.execute("SELECT rows, bytes FROM models").fetchone()
            assert counted == tuple(n or 0 for n in connection.execute(there).fetchone())
            connection.close()


def test_killed_a_few_times_it_always_opens_again(tmp_path):
    kill_often(str(tmp_path / "store.db"), 6)


@pytest.mark.slow
def test_killed_a_hundred_times_it_always_opens_again(where):
    kill_often(where, 100)


def lead(where: str, out: TextIO) -> None:
    """Swap as fast as it goes, as long as it leads."""
    store = opened(where)
    while True:
        lease = store.lease("recalibration", store.engine, 0.5)
        if lease is not None:
            state = store.decide("swap", {}, by=lease, draft=Draft("temperature", "{}", in_force=True))
            out.write(f"swap {state.revision} {lease.token}\n")
        time.sleep(0.002)


def test_a_leader_that_is_killed_is_followed_by_the_other_and_nothing_is_decided_twice(where):
    child = Child(lambda out: lead(where, out))
    child.said.readline()
    with opened(where) as follower:
        assert follower.lease("recalibration", follower.engine, 0.5) is None
        before = follower.state().revision
        while follower.state().revision < before + 20:
            time.sleep(0.01)
        acknowledged = {int(words[1]): int(words[2]) for words in child.kill()}
        while (lease := follower.lease("recalibration", follower.engine, 60)) is None:
            time.sleep(0.02)
        assert lease.token == max(acknowledged.values()) + 1
        state = follower.state()
        assert state.revision >= max(acknowledged)
        follower.decide("rollback", {}, by=lease, revision=state.revision, calibration=1)
        *theirs, ours = follower.decisions(10**6)
        assert [decision.revision for decision in theirs] == list(range(1, state.revision + 1))
        assert {decision.token for decision in theirs} == {lease.token - 1}
        assert [decision.version for decision in theirs] == list(range(1, state.revision + 1))
        assert (ours.revision, ours.token) == (state.revision + 1, lease.token)


def lead_and_sleep(where: str, out: TextIO) -> None:
    """Lead, sleep as a machine that is suspended does, and go on without knowing."""
    store = opened(where)
    lease = store.lease("recalibration", store.engine, 0.3)
    assert lease is not None
    out.write("leads\n")
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        store.decide("swap", {}, by=lease, draft=Draft("temperature", "{}", in_force=True))
    except NotLeader as error:
        out.write(f"{error}\n")
    else:
        out.write("decided\n")


def test_a_leader_that_was_asleep_decides_nothing_more(where):
    child = Child(lambda out: lead_and_sleep(where, out))
    child.said.readline()
    with opened(where) as follower:
        while (lease := follower.lease("recalibration", follower.engine, 60)) is None:
            time.sleep(0.05)
        revision = follower.decide("freeze", {}, by=lease, frozen=True).revision
        os.kill(child.process, signal.SIGCONT)
        assert "leads no more" in child.said.readline()
        child.kill()
        assert follower.state().revision == revision
