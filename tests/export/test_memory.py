"""What an export needs beside the model: no more than the model again, and a process's own gigabyte."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from offramp.export import export_bundle
from offramp.runtime import Cascade
from toys import Plain, make

PEAK = """
import sys
import torch
sys.path.insert(0, {support!r})
from offramp.export import export_bundle
from toys import Plain, make
export_bundle(make(Plain, 1024, 4, {exits}), torch.randn(3, 1024), sys.argv[1])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the peak")
@pytest.mark.parametrize("exits", [6, 12, 20])
def test_peak_memory_is_a_gigabyte_and_three_times_the_weights_at_any_number_of_exits(tmp_path, exits):
    program = PEAK.format(support=str(Path(__file__).parents[1] / "support"), exits=exits)
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "b"], capture_output=True, text=True, check=True)
    weights = exits * 1024 * 1024 * 4
    assert int(done.stdout) * 1024 < 3 * weights + 2**30


@pytest.mark.slow
def test_a_network_too_deep_for_a_graph_of_all_its_blocks_is_exported_without_one(tmp_path):
    said = []
    bundle = export_bundle(make(Plain, 4, 2, 36), torch.randn(3, 4), tmp_path / "b", progress=said.append)
    assert said[-1] == "without a cascade graph: 36 exits, one inside the other, are more than an ONNX file holds."
    with Cascade.load(bundle, threads=1) as cascade:
        assert len(cascade.record({"x": torch.randn(2, 4).numpy()}).logits) == 36
