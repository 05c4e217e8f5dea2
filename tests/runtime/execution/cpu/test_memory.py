"""Mapped pages are given back, and read anew when somebody wants them after all."""

import mmap
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from offramp.runtime.execution.cpu.memory import release_mapped

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are given back on Linux only")


def resident(path):
    """Resident KiB of this process's mappings of a file."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def mapped(path, size):
    path.write_bytes(b"x" * size)
    with path.open("r+b") as stream:
        # As ONNX Runtime maps weights: private. (Pages of a shared mapping that was just written may be dirty.)
        return mmap.mmap(stream.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)


def test_pages_of_the_folder_are_dropped_and_keep_their_content(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    size = 4 << 20
    one, other = mapped(tmp_path / "a" / "weights.bin", size), mapped(tmp_path / "b" / "weights.bin", size)
    assert one[:] == other[:] == b"x" * size
    assert resident(tmp_path / "a" / "weights.bin") >= 4000
    release_mapped(tmp_path / "a")
    if resident(tmp_path / "a" / "weights.bin") >= 4000:
        pytest.skip("this kernel doesn't drop pages on request")
    assert resident(tmp_path / "a" / "weights.bin") < 400
    assert resident(tmp_path / "b" / "weights.bin") >= 4000
    assert one[:] == b"x" * size


def test_a_folder_that_nothing_is_mapped_from_is_fine(tmp_path):
    release_mapped(tmp_path)
    release_mapped(tmp_path / "gone")


# 16 MB, three times over, in a thread: MiB that the process has before and behind it.
USE = """
import sys, threading
from pathlib import Path
import numpy as np
from offramp.runtime.execution.cpu.memory import give_back_large

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024

def use():
    for _ in range(3):
        held = [np.ones(1_000_000) for _ in range(2)]
        del held
    print(before, resident())

if sys.argv[1] == "back":
    give_back_large()
before = resident()
thread = threading.Thread(target=use)
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps what is freed, and can be asked not to")
@pytest.mark.parametrize(("how", "kept"), [("back", False), ("as it is", True)])
def test_what_is_large_is_given_back_once_that_was_asked_for(how, kept):
    done = subprocess.run([sys.executable, "-c", USE, how], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert (after - before > 8) == kept
