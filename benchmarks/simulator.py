"""Simulated against measured latencies, at loads that the simulator wasn't fitted on.

    python benchmarks/simulator.py [--shares 0.3 0.55 0.75] [--points fast full] [--seconds 8] [--no-save]

The sample of intents: `offramp bench bundle data --simulate` and, right after it, `offramp serve` under the same open
loops. Shares are of what 64 connections carry in the simulation, so that nothing of the measured run enters it. How
of the machine others took meanwhile is printed: on a machine that does something else neither is worth anything.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import save, table
from offramp.runtime import sample
from offramp.server.load.arrivals import Closed, Poisson, poisson
from offramp.server.load.clients import clients
from offramp.server.load.connection import resolve
from offramp.server.load.requests import PREDICT, bodies, post, read_rows
from offramp.server.load.serving import served
from offramp.server.load.target import target
from offramp.server.simulating.simulate import simulate_bench

QUANTILES = (0.5, 0.9, 0.99)


class Others:
    """The share of all cores that processes other than ours take; Linux only."""

    def __enter__(self) -> "Others":
        self._before = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        idle, total = (b - a for a, b in zip(self._before, self._read(), strict=True))
        self.idle = idle / max(total, 1)

    @staticmethod
    def _read() -> tuple[int, int]:
        values = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return values[3] + values[4], sum(values)


def measure(bundle: Path, data: Path, point: str, rates: list[float], seconds: float) -> list[dict[str, float]]:
    found = []
    with served(bundle) as server, clients(1) as own:
        known = target(server.url)
        sent = bodies(read_rows(data, known).instances, 1, point)
        host = known.url.removeprefix("http://")
        own.ask_with({point: [post(host, PREDICT, body) for body in sent]}, resolve(known.host, known.port))
        own.closed(point, 16, seconds=1.0, warm=0.0)
        for rate in rates:
            arrivals = poisson(rate, 1.0 + seconds, 1)
            with Others() as others:
                one = own.open(point, arrivals, seconds=seconds, warm=1.0)
            found.append({f"p{q * 100:.0f}_ms": one.ms(q) for q in QUANTILES} | {"idle": others.idle})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.55, 0.75])
    parser.add_argument("--points", nargs="+", default=["fast", "full"])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    shown = [("point", "requests/s", *(f"p{q * 100:.0f} simulated, measured ms" for q in QUANTILES), "ratios", "idle")]
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        bundle, data = sample.intents(Path(scratch) / "intents"), Path(scratch) / "rows.jsonl"
        rows, _ = sample.sentences()
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text, _ in rows), encoding="utf-8")
        for point in options.points:
            began = time.perf_counter()
            loads = [Closed(64), *(Poisson(share=share) for share in options.shares)]
            found = simulate_bench(bundle, data, points=[point], loads=loads, client=True)
            print(f"{point}: {time.perf_counter() - began:.1f} s to simulate;", found.about["measured"], flush=True)
            lines = [line for line in found.times if line["kind"] == "poisson"]
            real = measure(bundle, data, point, [line["rate"] for line in lines], options.seconds)
            for line, one in zip(lines, real, strict=True):
                ratios = {name: line[name] / one[name] for name in one if name != "idle"}
                results.append({"simulated": line, "measured": one, "ratios": ratios})
                shown.append(
                    (
                        point,
                        f"{line['rate']:.0f}",
                        *(f"{line[name]:.2f}, {one[name]:.2f}" for name in ratios),
                        " ".join(f"{value:.2f}" for value in ratios.values()),
                        f"{one['idle']:.0%}",
                    )
                )
            print("faster than real time:", round(found.about["faster_than_real_time"]))
    print(table(shown))
    worst = np.abs(np.log([[one["ratios"]["p50_ms"], one["ratios"]["p99_ms"]] for one in results])).max()
    print(f"p50 and p99 are within {np.exp(worst) - 1:.0%}")
    if not options.no_save:
        print(save("simulator", results))


if __name__ == "__main__":
    main()
