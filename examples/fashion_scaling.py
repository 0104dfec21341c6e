# SPDX-License-Identifier: Apache-2.0
"""What the paper's Fashion-MNIST runs would cost on 1 to 64 workers, until they reach 90 % test accuracy.

python examples/fashion_scaling.py --measure                  # writes step_times.csv; on a machine that is idle
python examples/fashion_scaling.py examples/results/fashion_mnist   # CSVs of fashion_mnist.py, or folders of them

The runs say which updates a method needs, the measurement says what an update takes, and two models join both. Nothing
is trained here. Writes scaling.md and scaling.png beside step_times.csv. What the models assume:

- **Fixed pool** of W workers, paid throughout. B images are split evenly: an update takes t(ceil(B / W)) + c(W).
- **Elastic pool** of at most W workers, the paper's premise: workers in proportion to the batch size, so that an update
  takes about the same time at every size. A batch has min(W, ceil(B / b)) workers, of about b images each while W
  suffices, and a worker is paid only while it is used. By default b = Bmax / W: the largest batch has all W workers, a
  smaller one fewer, and so has a method that stays at B0.
- **t(n)** is the measured time of a training step (forward, backward, SGD) of n images on one worker: interpolated on
  logarithmic scales; beyond the largest size on the line through the last two; below the smallest size, its time.
- **c(W)** is a ring all-reduce of the gradient after the backward pass, none of it hidden: 2 (W - 1) / W * bytes /
  bandwidth + 2 (W - 1) * latency. The defaults stand for 10-gigabit Ethernet with TCP; it is shown without, too.
- **A run** counts up to the first epoch that ends with the accuracy, with each epoch's mean batch size, rounded. Costs
  are means over seeds, of the runs that get there (column "runs"); where none does, there is '-'.
- **Left out**: loading, evaluating, slow workers, starting and stopping workers (an elastic pool changes for free),
  what a rule measures, and what another optimizer than SGD takes.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import numpy as np
from fashion_steps import StepTime, measure, step_seconds
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

FIXED, ELASTIC, RING, FREE = "Fixed pool", "Elastic pool", "ring all-reduce", "free communication"
Workers = Callable[[int], int]  # of a batch
Seconds = Callable[[int], float]  # of a step of so many images, or of an all-reduce of so many workers
COLOURS = colormaps["tab20"].colors[::2] + colormaps["tab20"].colors[1::2]


@dataclass(frozen=True)
class Epoch:
    """The updates between two rows of a run, and the accuracy after them."""

    updates: int
    batch_size: int
    accuracy: float | None


@dataclass(frozen=True)
class Run:
    """One run of one method."""

    method: str
    seed: str
    epochs: Sequence[Epoch]


@dataclass(frozen=True)
class Cost:
    """What a run takes."""

    updates: float
    seconds: float
    worker_seconds: float


def used(size: int, pool: int, share: Fraction | int | None = None) -> int:
    """Return how many workers have a batch: all, or as many as leave at most ``share`` images to each, up to all."""
    return pool if share is None else min(pool, math.ceil(Fraction(size) / share))


def all_reduce(workers: int, latency: float, bandwidth: float, size: int = 4 * 111_050) -> float:
    """Return the time of a ring all-reduce: 2 (W - 1) messages of 1 / W of the gradient, one after the other."""
    return 2 * (workers - 1) * (size / workers / bandwidth + latency)


def epochs_of(rows: Iterable[Mapping[str, str]], images: int) -> list[Epoch]:
    """Return what happened between the rows of a run, which started at 0 whether it has a row for that or not."""
    found = []
    for before, row in pairwise([{"epochs": "0", "updates": "0"}, *rows]):
        passed, updates = float(row["epochs"]) - float(before["epochs"]), int(row["updates"]) - int(before["updates"])
        if updates < 0:
            raise ValueError(f"{row['updates']} updates come after {before['updates']}: sort the rows of a run.")
        size = max(1, round(passed * images / updates)) if updates else 1
        found.append(Epoch(updates, size, float(row["test_accuracy"]) if row["test_accuracy"] else None))
    return found


def until(run: Run, accuracy: float) -> Run | None:
    """Return the run up to its first epoch that ends with the accuracy; None if there is none."""
    ends = [count for count, e in enumerate(run.epochs, 1) if e.accuracy is not None and e.accuracy >= accuracy]
    return replace(run, epochs=run.epochs[: ends[0]]) if ends else None


def cost(run: Run, pool: Workers, step: Seconds, network: Seconds) -> Cost:
    """Return what a run takes on a pool."""
    seconds = worker_seconds = 0.0
    for epoch in run.epochs:
        workers = pool(epoch.batch_size)
        # All wait for the one with the largest part of the batch.
        taken = epoch.updates * (step(math.ceil(epoch.batch_size / workers)) + network(workers))
        seconds += taken
        worker_seconds += taken * workers
    return Cost(sum(epoch.updates for epoch in run.epochs), seconds, worker_seconds)


def mean_cost(runs: Iterable[Run], pool: Workers, step: Seconds, network: Seconds) -> Cost:
    """Return what the runs of a method take: the mean over seeds, of which one with several runs counts once."""
    seeds: dict[str, list[tuple[float, ...]]] = {}
    for run in runs:
        seeds.setdefault(run.seed, []).append(astuple(cost(run, pool, step, network)))
    return Cost(*map(float, np.mean([np.mean(costs, axis=0) for costs in seeds.values()], axis=0)))


def read_runs(paths: Sequence[Path], images: int) -> list[Run]:
    """Read the runs of CSV files, and of all CSV files of folders."""
    runs: dict[tuple[str, str, str], Run] = {}
    for path in (file for given in paths for file in (sorted(given.glob("*.csv")) if given.is_dir() else [given])):
        rows: dict[tuple[str, str, str], list[dict[str, str]]] = {}
        with path.open(newline="") as file:
            for row in (line for line in csv.DictReader(file) if "test_accuracy" in line):  # no other tables
                rows.setdefault((row["method"], row["seed"], row["run"]), []).append(row)
        if both := sorted(runs.keys() & rows):  # a mean over one run and its repetition elsewhere would mislead
            raise SystemExit(f"{path} has a run that another file has too: {both[0][2]}. Give one of them.")
        runs |= {key: Run(*key[:2], tuple(epochs_of(its, images))) for key, its in rows.items()}
    if not runs:
        raise SystemExit(f"There is no run in {', '.join(map(str, paths))}.")
    return list(runs.values())


def table(runs: Mapping[str, Sequence[Run | None]], costs: Mapping[str, Sequence[Cost]], workers: Sequence[int]) -> str:
    """Return the table of a model, aligned, so that a terminal shows it well too."""
    lines = [["method", "runs", "updates", *map(str, workers)]]
    for method, its in runs.items():
        cells = [f"{one.seconds / 60:.3g} / {one.worker_seconds / 3600:.3g}" for one in costs[method]]
        start = [method, f"{sum(run is not None for run in its)} of {len(its)}"]
        lines.append([*start, *([f"{costs[method][0].updates:,.0f}", *cells] if cells else "-" * (1 + len(workers)))])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    rows = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(costs: Mapping[tuple[str, str], Mapping[str, Sequence[Cost]]], workers: Sequence[int], path: Path) -> None:
    """Draw wall-clock against workers, a panel per pool, and worker-hours against wall-clock for both."""
    figure = Figure(figsize=(14, 4.6), layout="constrained")
    panels = figure.subplots(1, 3)
    panels[1].sharey(panels[0])
    for (pool, network), methods in costs.items():
        panel, look = (panels[0], "o-") if pool == FIXED else (panels[1], "s--")
        for color, (method, its) in zip(COLOURS, methods.items(), strict=False):
            minutes, hours = [one.seconds / 60 for one in its], [one.worker_seconds / 3600 for one in its]
            if network == FREE:
                panel.loglog(workers[: len(its)], minutes, ":", color=color)
                continue
            label = method if its else f"{method}: never"
            panel.loglog(workers[: len(its)], minutes, look, color=color, ms=4, label=label)
            panels[2].loglog(minutes, hours, look, color=color, ms=4)
            if its:
                panels[2].annotate(f" {workers[-1]}", (minutes[-1], hours[-1]), color=color, fontsize=8)
        panel.set(xlabel="workers, at most", ylabel="wall-clock, minutes", title=f"{pool} (dotted: {FREE})")
        panel.set(xticks=workers, xticklabels=workers)
    panels[2].set(xlabel="wall-clock, minutes", ylabel="worker-hours", title="Trade-off (dashed: elastic)")
    for panel in panels:
        panel.grid(alpha=0.3, which="both")
    for axis in (panels[2].xaxis, *(panel.yaxis for panel in panels)):
        axis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}", minor_formatter=NullFormatter())
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5), frameon=False)
    figure.savefig(path, dpi=120)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", metavar="CSV", help="runs: files, or folders of them")
    parser.add_argument("--measure", action="store_true", help="time training steps first, into step_times.csv")
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu", help="to measure on")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2**k for k in range(2, 11)], help="default: 4 to 1024")
    parser.add_argument("--repeats", type=int, default=100, help="measured steps of each size; default: 100")
    parser.add_argument("--accuracy", type=float, default=0.9, help="on the test set, to be reached")
    parser.add_argument("--images", type=int, default=60_000, help="training images of the runs")
    parser.add_argument("--workers", type=int, nargs="+", default=[2**k for k in range(7)], help="W; default: 1 to 64")
    parser.add_argument("--max-batch-size", type=int, default=1024, help="Bmax")
    parser.add_argument("--per-worker", type=int, help="b, images per worker of the elastic pool; default: Bmax / W")
    parser.add_argument("--latency", type=float, default=50e-6, help="seconds per message; default: 5e-5")
    parser.add_argument("--bandwidth", type=float, default=1.25e9, help="bytes per second; default: 1.25e9")
    parser.add_argument("--out", type=Path, default=Path("fashion_scaling"), help="folder of all that is written")
    return parser.parse_args(given)


def main(args: argparse.Namespace) -> None:
    """Measure, count, write and draw."""
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "step_times.csv"
    if args.measure:
        measured = measure(args.sizes, args.repeats, args.accelerator)
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([StepTime.__match_args__, *map(astuple, measured)])
        print(path.read_text())
    if not args.runs:
        return
    if not path.exists():
        raise SystemExit(f"{path} is not there. Measure step times first, with --measure and the same --out.")
    runs: dict[str, list[Run | None]] = {}
    for run in read_runs(args.runs, args.images):
        runs.setdefault(run.method, []).append(until(run, args.accuracy))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    times = [StepTime(int(row["batch_size"]), float(row["seconds"])) for row in rows]
    share = {most: args.per_worker or Fraction(args.max_batch_size, most) for most in args.workers}
    pools = {
        FIXED: [partial(used, pool=most) for most in args.workers],
        ELASTIC: [partial(used, pool=most, share=share[most]) for most in args.workers],
    }
    step = partial(step_seconds, times)
    ring = partial(all_reduce, latency=args.latency, bandwidth=args.bandwidth)
    networks = {RING: ring, FREE: partial(all_reduce, latency=0.0, bandwidth=math.inf)}
    costs = {
        (pool, net): {
            method: [mean_cost(filter(None, its), one, step, networks[net]) for one in pools[pool] if any(its)]
            for method, its in runs.items()
        }
        for pool, net in product(pools, networks)
    }
    largest = max((e.batch_size for its in runs.values() for run in filter(None, its) for e in run.epochs), default=0)
    known = ", ".join(f"{1000 * one.seconds:.3g} ms for {one.batch_size} images" for one in times)
    text = [
        f"# Time and cost to {100 * args.accuracy:g} % test accuracy on Fashion-MNIST",
        (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip(),
        f"Step times of one worker, {rows[0]['hardware']}: {known}. The largest batch of a run has {largest} images.",
        f"Network: {8e-9 * args.bandwidth:g} Gbit/s, {1e6 * args.latency:g} µs per message.",
        f"Elastic pool: b = {args.per_worker or f'{args.max_batch_size} / W'}. Cells: minutes / worker-hours.",
        *(f"## {', '.join(key)}\n\n{table(runs, its, args.workers)}" for key, its in costs.items()),
    ]
    print(*text[2:], sep="\n\n")
    (args.out / "scaling.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    draw(costs, args.workers, args.out / "scaling.png")


if __name__ == "__main__":
    main(arguments())
