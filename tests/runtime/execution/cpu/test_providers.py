"""Providers are tried, not believed: what is built in may lack its libraries or its device."""

import types

import numpy as np
import pytest
from offramp.runtime.execution.cpu import providers
from offramp.runtime.execution.cpu.providers import tried_providers
from offramp.runtime.execution.cpu.session import onnxruntime


def test_each_installed_provider_is_tried_and_the_cpus_works():
    tried = tried_providers()
    assert list(tried) == onnxruntime().get_available_providers()
    assert tried["CPUExecutionProvider"] == ""
    assert all("\n" not in fault for fault in tried.values())


def test_one_that_leaves_the_work_to_the_cpu_does_not_work():
    """ONNX Runtime's builds for the CPU name one that runs none of the usual operations."""
    tried = tried_providers()
    if "AzureExecutionProvider" not in tried:
        pytest.skip("this ONNX Runtime is built without it")
    assert "CPU" in tried["AzureExecutionProvider"]


@pytest.mark.parametrize("how", ["passed over", "raises", "wrong"])
def test_each_way_not_to_work_is_told(monkeypatch, how):
    class Session:
        def __init__(self, model, options, providers, enable_fallback):
            assert not enable_fallback, "or it would print that it goes on without"
            self.providers = providers
            if how == "raises":
                raise RuntimeError("no\n  device")

        def get_providers(self):
            return ["CPUExecutionProvider"] if how == "passed over" else self.providers

        def run(self, outputs, feed):
            return [np.zeros((1, 2), np.float32)]

    real = onnxruntime()
    fake = types.SimpleNamespace(
        get_available_providers=lambda: ["XExecutionProvider"],
        SessionOptions=real.SessionOptions,
        InferenceSession=Session,
    )
    monkeypatch.setattr(providers, "onnxruntime", lambda: fake)
    said = {
        "passed over": "ONNX Runtime takes CPUExecutionProvider in its place",
        "raises": "no device",
        "wrong": "it says that [[1.0, 2.0]] times 1 is [[0.0, 0.0]]",
    }
    assert tried_providers() == {"XExecutionProvider": said[how]}
