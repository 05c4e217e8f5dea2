"""A disk without room stops what is kept, with an alarm; never an answer. It goes on by itself when there is room."""

import subprocess
import sys
from pathlib import Path

import pytest

# A limit on a process's files stands for a disk that is full: root may exceed every quota, but not this.
PROGRAM = """
import resource, sys, time
sys.path.insert(0, "tests/support")
import numpy as np
from kept_rows import opened, rows
from offramp.runtime.errors import StoreError

def room(bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, resource.RLIM_INFINITY))

store = opened(sys.argv[1], unflushed=64)
store.append(rows(["first"]))
store.flush()
before = store.decide("freeze", {}, by="anna", frozen=True)
room(600_000)
answered = 0
while store.alarm is None and answered < 100_000:
    store.append(rows([f"r{answered}-{k}" for k in range(8)], inputs=[b"x" * 2000] * 8))
    answered += 8
    time.sleep(0.001)
print("alarm:", store.alarm)
for k in range(100):
    store.append(rows([f"more {k}"]))
print("dropped:", store.dropped > 0)
for attempt in (
    lambda: store.feedback(["first"], [0], [1]),
    lambda: store.decide("swap", {}, by="anna", frozen=False),
):
    try:
        attempt()
        print("written")
    except StoreError:
        print("refused")
print("state:", store.state() == before)
print("first:", store.window(limit=10**6).time[0] == 1e9)
room(resource.RLIM_INFINITY)
for _ in range(200):
    if store.alarm is None:
        break
    time.sleep(0.05)
print("alarm:", store.alarm)
print(store.feedback(["first"], [0], [1])[0])
print("kept again:", store.append(rows(["last"])), store.flush(), store.window().time[-1] == 1e9)
store.close()
"""


# Nothing waits that would be tried again: only a look at the disk itself can tell.
QUIET = """
import resource, sys, time
sys.path.insert(0, "tests/support")
from kept_rows import opened, rows
from offramp.runtime.errors import StoreError

store = opened(sys.argv[1])
store.append(rows(["first"]))
store.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
try:
    store.feedback(["first"], [0], [1])
except StoreError:
    print("refused")
alarms = set()
for _ in range(30):
    alarms.add(store.alarm is None)
    time.sleep(0.1)
print("all well:", alarms)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
while store.alarm is not None:
    time.sleep(0.05)
print(store.feedback(["first"], [0], [1])[0])
"""


def run(program: str, path: Path) -> list[str]:
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[4], timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_an_alarm_lasts_as_long_as_the_disk_is_full_though_nothing_waits(tmp_path):
    assert run(QUIET, tmp_path / "store.db") == ["refused", "all well: {False}", "accepted"]


def test_a_full_disk_stops_nothing_but_what_is_kept_and_only_as_long_as_it_is_full(tmp_path):
    alarm, *rest = run(PROGRAM, tmp_path / "store.db")
    assert "store.db" in alarm
    assert rest == [
        "dropped: True",
        "refused",
        "refused",
        "state: True",
        "first: True",
        "alarm: None",
        "accepted",
        "kept again: True None True",
    ]
