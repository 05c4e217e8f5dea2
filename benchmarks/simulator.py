"""Simulated against measured latencies, at loads that the simulator wasn't fitted on.

    python benchmarks/simulator.py [--samples intents digits] [--points fast full] [--shares 0.3 0.5 0.7] [--turns 3]

For each sample model and point: `offramp bench bundle data --simulate` and, right after it, `offramp serve`, started
twice, under the same open loops, several turns of each. Shares are of what 64 connections carried when the simulator
measured, so that nothing of the measured runs enters it. Measured is the median over all turns. How far the two runs
are from each other is printed beside it: nearer than that to either the simulated one can't be but by chance.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from harness import save, table
from offramp.runtime import sample
from offramp.server.load.arrivals import Poisson, poisson
from offramp.server.load.clients import clients
from offramp.server.load.connection import resolve
from offramp.server.load.requests import PREDICT, bodies, post, read_rows
from offramp.server.load.serving import served
from offramp.server.load.target import target
from offramp.server.simulating.simulate import simulate_bench

QUANTILES = (0.5, 0.9, 0.99)
NAMES = [f"p{q * 100:.0f}_ms" for q in QUANTILES]


def bundle_and_data(name: str, scratch: Path) -> tuple[Path, Path]:
    if name == "digits":
        x, labels = sample.heldout()
        np.savez(scratch / "rows.npz", x=x, labels=labels)
        return Path(sample.BUNDLE), scratch / "rows.npz"
    bundle, data = sample.intents(scratch / name), scratch / "rows.jsonl"
    rows, _ = sample.sentences()
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text, _ in rows), encoding="utf-8")
    return bundle, data


def measure(
    bundle: Path, data: Path, point: str, rates: list[float], seconds: float, turns: int
) -> dict[float, list[list[float]]]:
    """By rate, a list a turn: milliseconds at each quantile."""
    found: dict[float, list[list[float]]] = {rate: [] for rate in rates}
    with served(bundle) as server, clients(1) as own:
        known = target(server.url)
        sent = bodies(read_rows(data, known).instances, 1, point)
        host = known.url.removeprefix("http://")
        own.ask_with({point: [post(host, PREDICT, body) for body in sent]}, resolve(known.host, known.port))
        own.closed(point, 64, seconds=1.0, warm=0.0)
        for turn in range(turns):
            for rate in rates:
                one = own.open(point, poisson(rate, 0.5 + seconds, [1, turn]), seconds=seconds, warm=0.5)
                found[rate].append([one.ms(q) for q in QUANTILES])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", nargs="+", default=["intents", "digits"])
    parser.add_argument("--points", nargs="+", default=["fast", "full"])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.5, 0.7])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    headings = (f"{name[:-3]} simulated, measured ms" for name in NAMES)
    shown = [("sample", "point", "requests/s", *headings, "ratios", "one run to the other", "p99 of the turns")]
    results = []
    for name in options.samples:
        with tempfile.TemporaryDirectory() as scratch:
            bundle, data = bundle_and_data(name, Path(scratch))
            for point in options.points:
                loads = [Poisson(share=share) for share in options.shares]
                found = simulate_bench(bundle, data, points=[point], loads=loads)
                print(f"{name} {point}: {found.about['measured']}", flush=True)
                print("faster than real time:", round(found.about["faster_than_real_time"]), flush=True)
                rates = [line["rate"] for line in found.times]
                real = [measure(bundle, data, point, rates, options.seconds, options.turns) for _ in range(2)]
                for line in found.times:
                    first, second = (run[line["rate"]] for run in real)
                    turns = first + second
                    usual = np.median(turns, axis=0).tolist()
                    ratios = [line[each] / value for each, value in zip(NAMES, usual, strict=True)]
                    apart = (np.median(first, axis=0) / np.median(second, axis=0)).tolist()
                    measured = dict(zip(NAMES, usual, strict=True))
                    results.append(
                        {
                            "sample": name,
                            "simulated": line,
                            "measured": measured,
                            "turns": turns,
                            "ratios": ratios,
                            "runs_apart": apart,
                        }
                    )
                    shown.append(
                        (
                            name,
                            point,
                            f"{line['rate']:.0f}",
                            *(f"{line[each]:.2f}, {value:.2f}" for each, value in measured.items()),
                            " ".join(f"{value:.2f}" for value in ratios),
                            " ".join(f"{value:.2f}" for value in apart),
                            " ".join(f"{turn[-1]:.1f}" for turn in turns),
                        )
                    )
    print(table(shown))
    for what, key in (("simulated and measured", "ratios"), ("two measured runs", "runs_apart")):
        off = np.array([[max(one[key][k], 1 / one[key][k]) - 1 for k in (0, 2)] for one in results])
        print(f"p50 and p99, {what}: within {off.max():.0%}; {(off <= 0.25).sum()} of {off.size} within 25%")
    if not options.no_save:
        print(save("-".join(["simulator", *options.samples, *options.points]), results))


if __name__ == "__main__":
    main()
