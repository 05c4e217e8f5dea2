"""A recording may be killed at any moment: what is there is whole, and the same command ends in the same bytes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from offramp.runtime import Cascade, InputError, sample
from offramp.runtime.jobs.recording import record as job
from offramp.runtime.jobs.recording.record import record
from offramp.runtime.jobs.recording.unfinished import folder_of
from offramp.runtime.records import read_index, read_records

ROWS = 3000
# Threads fixed and every chunk checkpointed, so that a kill finds something to go on with.
SCRIPT = """
import sys, time
from offramp.runtime import Cascade
from offramp.runtime.jobs.recording.record import record
bundle, data, out = sys.argv[1:4]
with Cascade.load(bundle, threads=1, batch_rows=32) as cascade:
    cascade.predict({"x": __import__("numpy").zeros((1, 8, 8), "uint8")})
    print("ready", flush=True)
    record(cascade, data, out, half="--half" in sys.argv, checkpoint=0.0, say=lambda text: print(text, flush=True))
"""


@pytest.fixture(scope="module")
def cascade():
    with Cascade.load(sample.BUNDLE, threads=1, batch_rows=32) as loaded:
        yield loaded


@pytest.fixture
def data(tmp_path):
    """Three shards of digits, one of each kind."""
    x, y = sample.heldout()
    rows = np.random.default_rng(0).integers(0, len(x), ROWS)
    folder = tmp_path / "data"
    folder.mkdir()
    np.savez(folder / "a.npz", x=x[rows[:1000]], labels=y[rows[:1000]])
    np.savez_compressed(folder / "b.npz", x=x[rows[1000:2500]], labels=y[rows[1000:2500]])
    np.savez(folder / "c.npz", x=x[rows[2500:]], labels=y[rows[2500:]])
    return folder


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def start(data, out, *options):
    command = [sys.executable, "-c", SCRIPT, str(sample.BUNDLE), str(data), str(out), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kill_at(random, data, out, span, *options):
    """Start recording, kill it at a random moment within `span` seconds; whether that came before its end."""
    process = start(data, out, *options)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(random.uniform(0, span))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


@pytest.mark.skipif(os.name != "posix", reason="kill -9 is of POSIX systems")
@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_ends_in_the_same_bytes(cascade, data, tmp_path, kills):
    began = time.monotonic()
    expected = content(record(cascade, data, tmp_path / "unbroken", half=True, checkpoint=0.0))
    span = 1.2 * (time.monotonic() - began)
    random = np.random.default_rng(kills)
    killed = resumed = 0
    for attempt in range(10 * kills):
        out = tmp_path / f"r{attempt}"
        for _ in range(2):  # sometimes the run that goes on is killed as well
            if killed == kills or out.exists():
                break
            if not kill_at(random, data, out, span, "--half"):
                span *= 0.8  # the moments are spread over as long as a run takes here and now
                break
            span *= 1.1
            killed += 1
        if not out.exists():
            process = start(data, out, "--half")
            said, error = process.communicate(timeout=120)
            assert process.returncode == 0, error
            resumed += "going on at row" in said
        assert content(out) == expected
        if killed == kills:
            break
    assert killed == kills, "runs end before they can be killed"
    assert resumed, "no kill left anything to go on with"
    # A kill after the result was in place may leave an empty shell, which the next run into that place removes.
    left = [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert not [p for p in left if (p / "work").exists()]


@pytest.mark.parametrize("rows", [0, 1000])
def test_an_interrupt_says_where_the_rows_done_are_kept_if_there_are_any(cascade, data, tmp_path, rows):
    def stop(done, _):
        if done >= rows:
            raise KeyboardInterrupt

    out = tmp_path / "r"
    with pytest.raises(KeyboardInterrupt) as stopped:
        record(cascade, data, out, checkpoint=0.0, progress=stop)
    kept = f"What is finished is kept in {folder_of(out)}: the same command goes on from there."
    assert getattr(stopped.value, "__notes__", []) == ([kept] if rows else [])
    said = []
    record(cascade, data, out, say=said.append)
    assert any("going on at row" in line for line in said) is bool(rows)


class Stopped(Exception):
    pass


def stop_after(rows):
    def progress(done, total):
        if done >= rows:
            raise Stopped

    return progress


def cut_short(cascade, data, out, rows, **options):
    with pytest.raises(Stopped):
        record(cascade, data, out, checkpoint=0.0, progress=stop_after(rows), **options)
    assert folder_of(out).is_dir()
    assert not out.exists()


def test_it_goes_on_where_it_was_cut_short_without_running_a_row_twice(cascade, data, tmp_path, monkeypatch):
    expected = content(record(cascade, data, tmp_path / "unbroken"))
    cut_short(cascade, data, tmp_path / "r", 1200)
    ran, said, seen = [], [], []
    run = Cascade.record
    monkeypatch.setattr(Cascade, "record", lambda self, i, **o: ran.append(len(i["x"])) or run(self, i, **o))
    record(cascade, data, tmp_path / "r", say=said.append, progress=lambda *at: seen.append(at))
    assert said == ["going on at row 1192 of 3000, where an earlier run was cut short"]
    assert sum(ran) == ROWS - 1192
    assert seen[0] == (1192, ROWS)
    assert content(tmp_path / "r") == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "r", "unbroken"]


def test_another_bundle_or_option_begins_again_and_says_why(cascade, data, tmp_path):
    cut_short(cascade, data, tmp_path / "r", 1200)
    said = []
    record(cascade, data, tmp_path / "r", half=True, allow_nonfinite=True, say=said.append)
    assert said == [
        "an earlier run was cut short, but --allow-nonfinite and --half changed since: beginning again",
    ]
    assert content(tmp_path / "r") == content(
        record(cascade, data, tmp_path / "fresh", half=True, allow_nonfinite=True)
    )


@pytest.mark.parametrize(("changed", "kept"), [("a.npz", 0), ("b.npz", 1000), ("c.npz", 2008)])
def test_data_that_changed_is_recorded_anew_from_there_on(cascade, data, tmp_path, changed, kept):
    cut_short(cascade, data, tmp_path / "r", 2000)
    with np.load(data / changed) as archive:
        x, y = archive["x"][::-1], archive["labels"][::-1]
    np.savez(data / changed, x=x, labels=y)
    said = []
    record(cascade, data, tmp_path / "r", say=said.append)
    assert said[0].startswith("going on at row" if kept else "an earlier run was cut short, but its data")
    if kept == 1000:
        assert "row 1000" in said[0]
    assert content(tmp_path / "r") == content(record(cascade, data, tmp_path / "fresh"))


def test_a_shard_more_begins_again(cascade, data, tmp_path):
    cut_short(cascade, data, tmp_path / "r", 1200)
    (data / "d.npz").write_bytes((data / "c.npz").read_bytes())
    said = []
    record(cascade, data, tmp_path / "r", say=said.append)
    assert said == ["an earlier run was cut short, but the data's files changed since: beginning again"]
    assert read_index(tmp_path / "r").rows == ROWS + 500


@pytest.mark.parametrize("damage", ["journal", "missing", "short"])
def test_what_is_left_of_an_earlier_run_is_not_trusted_blindly(cascade, data, tmp_path, damage):
    cut_short(cascade, data, tmp_path / "r", 1200)
    folder = folder_of(tmp_path / "r")
    if damage == "journal":
        (folder / "journal.json").write_text('{"key": ')
    elif damage == "missing":
        (folder / "work" / "score_1.npy").unlink()
    else:
        (folder / "work" / "logits_1.npy").write_bytes(b"\x93NUMPY")
    record(cascade, data, tmp_path / "r")
    assert content(tmp_path / "r") == content(record(cascade, data, tmp_path / "fresh"))


def test_of_two_runs_into_one_folder_one_wins_and_the_other_is_told(cascade, data, tmp_path):
    inside, go, errors = threading.Event(), threading.Event(), []

    def hold(done, total):
        inside.set()
        go.wait(30)

    def first():
        record(cascade, data, tmp_path / "r", progress=hold)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(30)
    try:
        with pytest.raises(InputError, match="another process is writing it") as caught:
            record(cascade, data, tmp_path / "r")
        errors.append(caught)
    finally:
        go.set()
        thread.join()
    assert len(read_records(tmp_path / "r")) == ROWS
    with pytest.raises(InputError, match="already exists"):
        record(cascade, data, tmp_path / "r")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "r"]


def test_overwriting_keeps_the_old_records_until_the_new_are_whole(cascade, data, tmp_path):
    old = content(record(cascade, data / "a.npz", tmp_path / "r"))
    with pytest.raises(Stopped):
        record(cascade, data, tmp_path / "r", overwrite=True, checkpoint=0.0, progress=stop_after(1200))
    assert content(tmp_path / "r") == old
    with pytest.raises(InputError, match="already exists"):
        record(cascade, data, tmp_path / "r")
    record(cascade, data, tmp_path / "r", overwrite=True)
    assert read_index(tmp_path / "r").rows == ROWS
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "r"]


def test_data_that_changes_under_the_reader_is_noticed(cascade, data, tmp_path):
    def touch(done, total):
        if done == 32:
            os.utime(data / "a.npz", (1, 1))

    with pytest.raises(InputError, match=r"a\.npz: changed while it was being read"):
        record(cascade, data, tmp_path / "r", progress=touch)


def test_a_bad_row_in_the_last_shard_leaves_the_others_recorded(cascade, data, tmp_path):
    np.savez(data / "c.npz", x=np.zeros((500, 8, 7), np.uint8), labels=np.zeros(500, int))
    with pytest.raises(InputError, match=r"c\.npz, in rows 0 to 31: input 'x'.*axis 2 is 7"):
        record(cascade, data, tmp_path / "r", checkpoint=0.0)
    x, y = sample.heldout()
    np.savez(data / "c.npz", x=np.resize(x, (500, 8, 8)), labels=np.resize(y, 500))
    said = []
    record(cascade, data, tmp_path / "r", say=said.append)
    assert said == ["going on at row 2500 of 3000, where an earlier run was cut short"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory's peak from /proc")
def test_memory_stays_that_of_a_batch(tmp_path):
    """30,000 rows of 10,000 bytes, compressed or not, never lie in the process's own memory."""
    code = """
import sys
from pathlib import Path
from offramp.runtime.jobs.data.tables import Npz
peak = 0
for block in Npz(Path(sys.argv[1])).blocks({"x": 0}, 0, 64):
    block["x"].sum()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = max(peak, int(status["RssAnon"].split()[0]))
print(peak // 1024)
"""
    x = np.zeros((30_000, 10_000), np.uint8)
    np.savez_compressed(tmp_path / "small.npz", x=x)
    np.savez(tmp_path / "plain.npz", x=x)
    for name in ("small.npz", "plain.npz"):
        command = [sys.executable, "-c", code, str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert int(done.stdout) < 150, "the array has 286 MiB"


def test_half_keeps_scores_and_says_what_it_found(cascade, data, tmp_path):
    plain = read_records(record(cascade, data, tmp_path / "f"))
    folder = record(cascade, data, tmp_path / "h", half=True)
    half = read_records(folder)
    assert [z.dtype for z in half.logits] == [np.float16] * 3
    assert (half.score == plain.score).all()
    assert (half.label == plain.label).all()
    assert sum(p.stat().st_size for p in folder.glob("logits*")) < 0.6 * sum(
        p.stat().st_size for p in (tmp_path / "f").glob("logits*")
    )
    found = json.loads((folder / "records.json").read_text())["source"]["half"]
    assert [one["stored"] for one in found] == ["float16"] * 3
    assert all(one["labels"] <= 1e-3 and one["pairs"] <= 2e-3 for one in found)


def test_a_kill_between_check_and_conversion_changes_nothing(cascade, data, tmp_path, monkeypatch):
    expected = content(record(cascade, data, tmp_path / "unbroken", half=True))
    store, calls = job.store_float16, []

    def store_then_stop(path):
        store(path)
        calls.append(path)
        if len(calls) == 2:
            raise Stopped

    monkeypatch.setattr(job, "store_float16", store_then_stop)
    with pytest.raises(Stopped):
        record(cascade, data, tmp_path / "r", half=True)
    monkeypatch.setattr(job, "store_float16", store)
    record(cascade, data, tmp_path / "r", half=True)
    assert content(tmp_path / "r") == expected
