"""What it costs a server to keep its answers and to learn from labels: two servers, with and without, in turns.

    python benchmarks/recalibration.py
    python benchmarks/recalibration.py --windows 20 --connections 64
    python benchmarks/recalibration.py --memory 1000000        # what it takes over so many rows; ten minutes

Both serve the bundled intents at a point with exits, and are asked for one sentence at a time on a few connections. A
label comes for one row in twenty, and shadow runs are as by default. CPU is the server process's own, user and system,
its thread that writes and its looks at the window included.
"""

import argparse
import json
import sys
import tempfile
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from harness import save, table
from offramp.runtime import sample
from request_cost import Clients, cpu_seconds, free_port, started
from scipy import stats

LABELLED = 20  # one row in so many


def label(port: int, names: list[tuple[str, int]], intents: list[str]) -> None:
    """Give some answered rows their labels."""
    rows = [{"request_id": name, "label": intents[number]} for name, number in names]
    body = json.dumps({"labels": rows}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/feedback", body) as reply:
        reply.read()


def upper_limit(ratios: np.ndarray) -> tuple[float, float]:
    """The geometric mean of ratios, and its upper 95% limit by Student's t on their logarithms."""
    logs = np.log(ratios)
    half = float(stats.t.ppf(0.95, len(logs) - 1)) * float(logs.std(ddof=1)) / len(logs) ** 0.5
    return float(np.exp(logs.mean())), float(np.exp(logs.mean() + half))


def resident(pid: int) -> float:
    """MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


def memory_over(rows: int, folder: Path, point: str) -> list[float]:
    """MiB after every twentieth of so many rows, 64 a request, of which the first is labelled in one of 20."""
    bundle, (sentences, _) = sample.intents(folder / "intents"), sample.sentences()
    texts = [text for text, _ in sentences]
    several = [json.dumps({"instances": [texts[(k + j) % len(texts)] for j in range(64)]}) for k in range(0, 512, 64)]
    intents = [intent for _, intent in sentences]
    port, taken = free_port(), []
    command = [sys.executable, "-m", "offramp.runtime.cli", "serve", str(bundle), "--port", str(port)]
    command += ["--operating-point", point, "--recalibration", str(folder / "kept.db")]
    with started([*command, "--recalibration-mode", "automatic"], port) as pid:
        clients = Clients(port, [body.encode() for body in several], 4)
        for done in range(20):
            clients.ask(rows // 20 // 64)
            label(port, [(name, 64 * number % len(intents)) for name, number in clients.names[::LABELLED]], intents)
            taken.append(resident(pid))
            print(f"{rows // 20 * (done + 1):,} rows: {taken[-1]:.0f} MiB", flush=True)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operating-point", default="fast")
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--requests", type=int, default=3000, help="a window and server")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>/recalibration.json")
    parser.add_argument("--memory", type=int, metavar="ROWS", help="measure memory alone, over so many rows")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.memory:
            taken = memory_over(options.memory, folder, options.operating_point)
            if options.save:
                print(save("recalibration-memory", {"rows": options.memory, "memory_mib": taken}))
            return
        bundle, (sentences, _) = sample.intents(folder / "intents"), sample.sentences()
        bodies = [json.dumps({"instances": [text]}).encode() for text, _ in sentences]
        intents = [intent for _, intent in sentences]
        servers: dict[str, Any] = {}
        for name in ("off", "on"):
            port = free_port()
            command = [sys.executable, "-m", "offramp.runtime.cli", "serve", str(bundle), "--port", str(port)]
            command += ["--operating-point", options.operating_point]
            if name == "on":
                command += ["--recalibration", str(folder / "kept.db"), "--recalibration-mode", "automatic"]
            pid = stack.enter_context(started(command, port))
            servers[name] = pid, port, Clients(port, bodies, options.connections)
        for _, _, clients in servers.values():
            clients.ask(options.requests)
        measured: dict[str, dict[str, list[float]]] = {name: {"cpu": [], "p99": [], "rate": []} for name in servers}
        memory = [resident(servers["on"][0])]
        for k in range(options.windows):
            for name in sorted(servers, reverse=bool(k % 2)):
                pid, port, clients = servers[name]
                before = cpu_seconds(pid)
                seconds = clients.ask(options.requests)
                if name == "on":
                    label(port, clients.names[::LABELLED], intents)
                found = measured[name]
                found["cpu"].append((cpu_seconds(pid) - before) / options.requests * 1e6)
                found["p99"].append(float(np.quantile(clients.took, 0.99)) * 1e3)
                found["rate"].append(options.requests / seconds)
            memory.append(resident(servers["on"][0]))
    lines = [("recalibration", "CPU a row, us", "p99, ms", "rows a second")]
    for name, found in measured.items():
        cpu, p99, rate = (float(np.median(found[kind])) for kind in ("cpu", "p99", "rate"))
        lines.append((name, f"{cpu:.0f}", f"{p99:.1f}", f"{rate:.0f}"))
    print(table(lines))
    ratios = {kind: np.array(measured["on"][kind]) / np.array(measured["off"][kind]) for kind in ("cpu", "p99", "rate")}
    for kind in ratios:
        mean, most = upper_limit(ratios[kind])
        print(f"{kind}, on / off: {mean:.3f}, geometric mean of {options.windows} windows; upper 95% limit {most:.3f}")
    print(f"memory with recalibration on: {memory[0]:.0f} MiB, {memory[-1]:.0f} MiB in the end")
    if options.save:
        print(save("recalibration", {"measured": measured, "memory_mib": memory}))


if __name__ == "__main__":
    main()
