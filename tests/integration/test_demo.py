"""The demo runs by itself and prints the table it promises."""

import subprocess
import sys


def test_demo_once_prints_the_table_and_ends():
    done = subprocess.run(
        [sys.executable, "-m", "offramp.runtime.cli", "demo", "--once"], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    # Which exits pay depends on the machine; the last one always stays.
    table = done.stdout.split("expected time against all exits\n")[1]
    kept = table.split(maxsplit=1)[0].split(",")
    assert kept[-1] == "2"
    for line in ("leave at exit 0", f"accuracy at exit {len(kept) - 1}", "accuracy in all", "abstained", "error among"):
        assert line in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("accuracy in all"))
    assert all(float(cell.rstrip("%")) > 95 for cell in row.split()[3:])
    saved = next(line for line in done.stdout.splitlines() if line.startswith("FLOPs saved"))
    full, balanced, fast = (float(cell.rstrip("%")) for cell in saved.split()[2:])
    assert 0 == full < balanced < fast if len(kept) == 3 else 0 == full <= balanced <= fast
    assert "http://127.0.0.1:" in done.stdout
