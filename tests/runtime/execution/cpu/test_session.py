"""Threads follow affinity and quota; a broken installation is told how to repair itself."""

import math
import sys
from importlib import metadata

import pytest
from offramp.runtime import InputError, RuntimeUnavailable
from offramp.runtime.execution.cpu import session


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ({"cpu.max": "nonsense"}, math.inf),
        ({}, math.inf),
    ],
)
def test_the_control_groups_quota_is_read(tmp_path, files, cpus):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert session.cgroup_cpus(tmp_path) == cpus


@pytest.mark.parametrize(
    ("affinity", "quota", "threads"), [(8, math.inf, 8), (8, 2.0, 2), (8, 0.5, 1), (1, 4.0, 1), (4, 2.5, 3)]
)
def test_threads_are_the_smaller_of_affinity_and_quota(monkeypatch, affinity, quota, threads):
    monkeypatch.setattr(session.os, "sched_getaffinity", lambda _: set(range(affinity)), raising=False)
    monkeypatch.setattr(session, "cgroup_cpus", lambda: quota)
    assert session.available_threads() == threads


def test_both_runtimes_installed_names_the_repair(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "1.0")
    with pytest.raises(RuntimeUnavailable, match="pip uninstall -y onnxruntime onnxruntime-gpu && pip install"):
        session.onnxruntime()


def test_no_runtime_installed_names_what_to_install(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(RuntimeUnavailable, match="pip install onnxruntime"):
        session.onnxruntime()


def test_an_unknown_device_and_a_missing_provider_are_named():
    with pytest.raises(InputError, match=r"device is 'tpu', expected one of \['cpu', 'cuda'\]"):
        session.resolve_providers("tpu", None)
    with pytest.raises(RuntimeUnavailable, match="has no NoSuchProvider"):
        session.resolve_providers("cpu", ["NoSuchProvider"])


@pytest.mark.parametrize(("version", "can"), [("1.20.1", False), ("1.26.0", False), ("1.27.0", True), ("2.0.0", True)])
def test_threads_spin_briefly_only_where_the_runtime_knows_how(version, can):
    assert session.can_spin_briefly(version) is can
