"""Cores follow affinity and every quota above this process, and a system that has neither has cores nonetheless."""

import math
import subprocess
import sys

import pytest
from offramp.runtime import arrays
from offramp.runtime.arrays import cores
from offramp.runtime.execution.cpu.session import available_threads

V2 = "31 23 0:28 {top} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
V1 = "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
HYBRID = V1 + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
OTHERS = "24 23 0:5 / /proc rw - proc proc rw\n33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def quota(cpus):
    return {"cpu.max": f"{int(cpus * 100_000)} 100000\n"}


def quota_v1(cpus):
    return {"cpu.cfs_quota_us": f"{int(cpus * 100_000)}\n", "cpu.cfs_period_us": "100000\n"}


CASES = {
    "its own": (V2, "/", "0::/\n", {"": quota(1.5)}, 1.5),
    "none": (V2, "/", "0::/\n", {"": {"cpu.max": "max 100000\n"}}, math.inf),
    "of the mount, in a namespace": (V2, "/", "0::/../../other\n", {"": quota(2)}, 2),
    "of a nested group": (V2, "/", "0::/system.slice/offramp.service\n", {"system.slice/offramp.service": quota(3)}, 3),
    "of the parent, which is less": (V2, "/", "0::/a/b/c\n", {"a": quota(0.5), "a/b/c": quota(4)}, 0.5),
    "of the parent, where the child has none": (
        V2, "/", "0::/a/b\n", {"a": quota(2), "a/b": {"cpu.max": "max 100000\n"}}, 2,
    ),
    "of a group that the mount begins at": (V2, "/pods/7", "0::/pods/7/x\n", {"": quota(5), "x": quota(6)}, 5),
    "a colon in the name": (V2, "/", "0::/a:b\n", {"a:b": quota(2)}, 2),
    "nonsense": (V2, "/", "0::/\n", {"": {"cpu.max": "nonsense"}}, math.inf),
    "a period of nothing": (V2, "/", "0::/\n", {"": {"cpu.max": "5 0"}}, math.inf),
    "version 1": (V1, "/", "4:cpu,cpuacct:/\n1:name=systemd:/x\n", {"cpu,cpuacct": quota_v1(0.5)}, 0.5),
    "version 1, none": (V1, "/", "4:cpu,cpuacct:/\n", {"cpu,cpuacct": {"cpu.cfs_quota_us": "-1"}}, math.inf),
    "version 1, nested": (
        V1, "/", "4:cpu,cpuacct:/a/b\n", {"cpu,cpuacct/a": quota_v1(2), "cpu,cpuacct/a/b": quota_v1(3)}, 2,
    ),
    "version 1 in docker": (V1, "/docker/1", "4:cpu,cpuacct:/docker/1\n", {"cpu,cpuacct": quota_v1(1.5)}, 1.5),
    "both": (HYBRID, "/", "4:cpu,cpuacct:/a\n0::/u\n", {"cpu,cpuacct/a": quota_v1(3), "unified/u": quota(2)}, 2),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_tightest_quota_of_all_groups_above_counts(tmp_path, case):
    mounts, top, own, groups, cpus = CASES[case]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(OTHERS + mounts.format(top=top))
    (tmp_path / "proc/self/cgroup").write_text(own)
    for group, files in groups.items():
        folder = tmp_path / "sys/fs/cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    assert cores.cpu_quota(tmp_path) == cpus


@pytest.mark.parametrize(("group", "files"), [("", quota(2)), ("cpu", quota_v1(2))])
def test_without_proc_the_usual_places_are_read(tmp_path, group, files):
    (tmp_path / "sys/fs/cgroup" / group).mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / "sys/fs/cgroup" / group / name).write_text(text)
    assert cores.cpu_quota(tmp_path) == 2


def test_a_system_without_groups_has_no_quota(tmp_path):
    assert cores.cpu_quota(tmp_path) == math.inf


@pytest.mark.parametrize(
    ("affinity", "quota", "threads"), [(8, math.inf, 8), (8, 2.0, 2), (8, 0.5, 1), (1, 4.0, 1), (4, 2.5, 3)]
)
def test_threads_of_arrays_and_of_sessions_are_the_smaller_of_affinity_and_quota(monkeypatch, affinity, quota, threads):
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(affinity)), raising=False)
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert arrays.usable_cores() == available_threads() == threads


def test_a_sandbox_that_does_not_say_its_affinity_has_the_machines_cores(monkeypatch):
    def refused(_):
        raise OSError("not here")

    monkeypatch.setattr(cores.os, "sched_getaffinity", refused, raising=False)
    monkeypatch.setattr(cores.os, "cpu_count", lambda: None)
    monkeypatch.setattr(cores, "cpu_quota", lambda: math.inf)
    assert cores.usable_cores() == 1


@pytest.mark.parametrize("without", ["sched_getaffinity", "fork register_at_fork", "getuid geteuid", "kill"])
def test_names_that_only_some_systems_have_are_not_needed(without):
    code = f"""if True:
        import os, sys
        for name in {without!r}.split():
            delattr(os, name)
        sys.modules["fcntl"] = sys.modules["resource"] = sys.modules["pwd"] = None
        from offramp.runtime import Cascade, jobs, sample
        from offramp.runtime.cli import main
        x, _ = sample.heldout()
        with Cascade.load(sample.BUNDLE) as cascade:
            cascade.predict({{"x": x[:4]}})
        sys.exit(main(["doctor"]))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
