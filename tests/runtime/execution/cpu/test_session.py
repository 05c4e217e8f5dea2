"""A broken installation is told how to repair itself."""

import sys
from importlib import metadata

import pytest
from offramp.runtime import InputError, RuntimeUnavailable, sample
from offramp.runtime.execution.cpu import session


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


@pytest.mark.parametrize("asked", [["CUDAExecutionProvider", "CPUExecutionProvider"], [("CUDAExecutionProvider", {})]])
def test_a_provider_that_is_passed_over_in_silence_is_said(monkeypatch, asked):
    real = session.onnxruntime()

    class OnTheCpu:
        """ONNX Runtime with a provider that it has and can't use: it goes on with the CPU's."""

        def __getattr__(self, name):
            return getattr(real, name)

        def InferenceSession(self, path, options, providers):
            return real.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(session, "onnxruntime", OnTheCpu)
    file = sample.BUNDLE / "block_0.onnx"
    with pytest.raises(
        RuntimeUnavailable, match=r"can't use CUDAExecutionProvider here, only \['CPUExecutionProvider'\]"
    ):
        session.open_session(file, threads=1, providers=asked)
    assert session.open_session(file, threads=1, providers=["CPUExecutionProvider"])
