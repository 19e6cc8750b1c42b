"""Which hook for which link: a step's time there, from bandwidth, times how many steps a loss takes, from convergence.

The first lines of RESULTS.md. A hook that does not come to bf16's loss with every seed is no choice, however short its
steps.
"""

from collections.abc import Sequence
from statistics import median

from benchmarks.bandwidth_report import label, launches, rate_words
from benchmarks.convergence_task import BASELINE, TaskRecords, look_up
from benchmarks.records import Record
from benchmarks.tables import Table

TASK = "gpt"
# Names in convergence of what bandwidth measures. Plain DDP takes bf16's steps: they differ by chance alone.
SAME = {
    "plain": BASELINE,
    "bf16": BASELINE,
    "powersgd": "powersgd-4",
    "powersgd-alternating": "alternating-4",
    "powersgd-8": "powersgd-8",
    "powersgd-8-alternating": "alternating-8",
    "topk": "topk-1",
}
NEAR = 1.1  # of the shortest time: as good, for the spread over seeds and rounds is no smaller


def advice(bandwidth: Sequence[Record], convergence: Sequence[Record]) -> str:
    """A table of seconds to bf16's loss by hook and link rate, and what it says; two nodes of one rank."""
    found = [launch["measured"] for launch in launches(bandwidth, (2, 1))]
    steps = _steps(look_up(convergence, TASK)) if convergence else {}
    if not found or not steps:
        return "Needs the records of both bandwidth and convergence."
    lines = [f"- {rate_words(measured['link_rate'])}: {_choice(measured, steps)}" for measured in found]
    columns = ["hook", *(rate_words(measured["link_rate"]) for measured in found)]
    table = Table("Seconds to the loss that bf16 has at the end of its run", columns)
    for name in SAME:
        times = [_seconds(measured, steps).get(name) for measured in found]
        table.rows.append([label(name), *("not reached" if x is None else f"{x:.1f}" for x in times)])
    return "\n".join(lines) + "\n\n" + table.markdown()


def _steps(task: TaskRecords) -> dict[str, float]:
    """The median over seeds of the steps to bf16's loss, by bandwidth's name, for those that always reach it."""
    found = {}
    for name, there in SAME.items():
        reached = [task.reached(there, seed) for seed in task.seeds] if there in task.curves else []
        steps = [x.step for x in reached if x]
        if steps and len(steps) == len(reached):
            found[name] = median(steps)
    return found


def _seconds(measured: Record, steps: dict[str, float]) -> dict[str, float]:
    variants = measured["variants"]
    return {name: steps[name] * variants[name]["step_ms"] / 1e3 for name in steps if name in variants}


def _choice(measured: Record, steps: dict[str, float]) -> str:
    seconds = _seconds(measured, steps)
    shortest = min(seconds.values())
    near = [name for name in SAME if name in seconds and seconds[name] <= NEAR * shortest]
    best = near[0]  # the simplest of those that are as good
    text = f"{label(best)}, {seconds[best]:.1f} s"
    if best != "plain" and "plain" in seconds:
        text += f", plain DDP {seconds['plain']:.1f} s"
    return text + (f"; as good: {'; '.join(map(label, near[1:]))}" if len(near) > 1 else "")
