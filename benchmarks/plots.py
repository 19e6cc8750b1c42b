"""The chart of the bandwidth benchmark: step time against link rate, with the crossovers marked."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, ScalarFormatter

from benchmarks.bandwidth_numbers import crossover
from benchmarks.bandwidth_rank import NO_SYNC
from benchmarks.bandwidth_report import BASES, label, rate_words
from benchmarks.records import Record

SHOWN = ("plain", "bf16", "fp16", "powersgd", "powersgd-alternating", "topk", "randomk", "torch-fp16", "torch-powersgd")
MARKERS = {"plain": "o", "bf16": "s"}  # of a crossover with it


def step_times(launches: Sequence[Record], path: Path) -> None:
    """Of launches that differ in their rate alone, in the order of their measured rates."""
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    for name in (NO_SYNC, *SHOWN):
        points = [(x["measured"]["link_rate"], x["measured"]["variants"].get(name)) for x in launches]
        if curve := [(rate, found) for rate, found in points if found]:
            color = _draw(axes, name, curve)
            _mark(axes, name, launches, color)
    rates = [x["measured"]["link_rate"] for x in launches]
    axes.set(xscale="log", yscale="log", xlabel="link rate, measured", ylabel="ms a step, median and range of rounds")
    axes.set_xticks(rates, [rate_words(rate) for rate in rates], rotation=20)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.minorticks_off()
    axes.set_title("Circles, squares: from here on no longer faster than plain DDP, than bf16", fontsize="medium")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw(axes: Axes, name: str, curve: Sequence[tuple[float, Record]]) -> Any:
    """Returns the curve's colour."""
    rates, found = zip(*curve, strict=True)
    middle = [x["step_ms"] for x in found]
    below = [x["step_ms"] - min(x["rounds_ms"]) for x in found]
    above = [max(x["rounds_ms"]) - x["step_ms"] for x in found]
    style = "--" if name == NO_SYNC or name.startswith("torch") else "-"
    return axes.errorbar(rates, middle, (below, above), label=label(name), linestyle=style, capsize=2)[0].get_color()


def _mark(axes: Axes, name: str, launches: Sequence[Record], color: Any) -> None:
    """On the curve, where it crosses the base lines'."""
    there = [x["measured"] for x in launches if name in x["measured"]["variants"]]
    rates, middle = np.log([x["link_rate"] for x in there]), np.log([x["variants"][name]["step_ms"] for x in there])
    for base in BASES:
        found = None if name in {NO_SYNC, base} else crossover(launches, name, base)
        if found and found.estimate:
            height = np.exp(np.interp(np.log(found.estimate), rates, middle))
            axes.plot(found.estimate, height, MARKERS[base], color=color, markerfacecolor="white", markersize=9)
