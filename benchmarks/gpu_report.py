"""What `python -m benchmarks.kernels --gpu` says of its measurements: rows, goals, tables and a plot."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from rich.markup import escape
from rich.table import Table

from benchmarks.gpu_shapes import MIB, BucketShapes
from benchmarks.gpu_timing import Case, Measured

KERNELS, COMPOSITION, TORCH_HOOK = "kernels", "plain torch", "torch's hook"
CAST_OPERATIONS = ("to_wire", "to_wire, residual", "from_wire_")
FULL_STEP, POWERSGD_HOOK = "PowerSGD full step", "powersgd_hook"
STREAMING_BYTES = 20 * MIB  # of buckets that are long enough to be held to the bandwidth of a large copy


@dataclass(frozen=True)
class Row:
    """One operation on one bucket, as one of its implementations."""

    bucket: str
    model: str
    megabytes: int
    dtype: str
    numel: int
    operation: str
    implementation: str
    us: float
    spread_us: float
    host_us: float
    gb_per_s: float
    percent_of_copy: float
    launches: int | None
    memory_operations: int | None
    error: str | None


@dataclass(frozen=True)
class Goal:
    """`worst` and `best` are of all rows that the goal is about. `met` is None if there are none."""

    goal: str
    limit: str
    worst: float | None
    best: float | None
    worst_bucket: str | None
    met: bool | None


def row(shapes: BucketShapes, case: Case, measured: Measured, copy_bandwidth: float) -> Row:
    bandwidth = case.bytes_moved / (measured.us * 1e-6) if measured.us else 0.0
    return Row(
        bucket=shapes.name,
        model=shapes.model,
        megabytes=shapes.megabytes,
        dtype=str(shapes.dtype).removeprefix("torch."),
        numel=shapes.numel,
        operation=case.operation,
        implementation=case.implementation,
        us=measured.us,
        spread_us=measured.spread_us,
        host_us=measured.host_us,
        gb_per_s=bandwidth * 1e-9,
        percent_of_copy=100 * bandwidth / copy_bandwidth,
        launches=measured.launches,
        memory_operations=measured.memory_operations,
        error=measured.error,
    )


def powersgd_limit_us(numel: int, copy_bandwidth: float, launches: int, launch_interval: float) -> float:
    """1.3 x the time that a copy takes for 28 bytes an element; plus the launches' time."""
    return 1e6 * (1.3 * 28 * numel / copy_bandwidth + launches * launch_interval)


def goals(rows: Sequence[Row], copy_bandwidth: float, launch_interval: float) -> list[Goal]:
    """The issue's goals. All of float32 buckets, for that is what 28 bytes are of."""
    single = [x for x in rows if x.dtype == "float32" and x.error is None]
    long = [x for x in single if x.numel * 4 >= STREAMING_BYTES and x.implementation == KERNELS]
    steps = [x for x in single if x.implementation == KERNELS and x.operation == FULL_STEP and x.launches is not None]
    times = {
        x.bucket: x.us / powersgd_limit_us(x.numel, copy_bandwidth, x.launches or 0, launch_interval)
        for x in steps
        if x.megabytes == 25
    }
    torchs = {x.bucket: x.us for x in single if x.implementation == TORCH_HOOK and x.operation == POWERSGD_HOOK}
    ours = {x.bucket: x.us for x in single if x.implementation == KERNELS and x.operation == POWERSGD_HOOK}
    ratios = {bucket: us / ours[bucket] for bucket, us in torchs.items() if bucket in ours}
    return [
        _at_least("cast, % of copy bandwidth", 90, _percents(long, CAST_OPERATIONS)),
        _at_least("block top-k, % of copy bandwidth", 80, _percents(long, ("select_blocks", "sum_blocks_"))),
        _at_most("PowerSGD rank 4, 25 MB: time / (1.3 x 28 bytes an element + launches)", 1, times),
        _at_most("PowerSGD: kernel launches a bucket", 8, {x.bucket: float(x.launches or 0) for x in steps}),
        _at_least("PowerSGD hook: x faster than torch's", 5, ratios),
    ]


def _percents(rows: Iterable[Row], operations: Sequence[str]) -> dict[str, float]:
    return {f"{x.bucket}: {x.operation}": x.percent_of_copy for x in rows if x.operation in operations}


def _at_least(goal: str, limit: float, values: dict[str, float]) -> Goal:
    return _goal(goal, f">= {limit:g}", values, worst=min(values, key=values.__getitem__, default=None), limit=limit)


def _at_most(goal: str, limit: float, values: dict[str, float]) -> Goal:
    return _goal(goal, f"<= {limit:g}", values, worst=max(values, key=values.__getitem__, default=None), limit=limit)


def _goal(goal: str, text: str, values: dict[str, float], worst: str | None, limit: float) -> Goal:
    if worst is None:
        return Goal(goal, text, None, None, None, None)
    value = values[worst]
    met = value >= limit if text.startswith(">=") else value <= limit
    best = max(values.values()) if text.startswith(">=") else min(values.values())
    return Goal(goal, text, value, best, worst, met)


def operations_table(rows: Sequence[Row], machine: dict[str, Any]) -> Table:
    """Each operation as kernels, beside plain torch and torch's hook."""
    table = Table(
        title=f"{machine['card']}: copies {machine['copy_gb_per_s']:.0f} GB/s, a launch {machine['launch_us']:.2f} us"
    )
    table.add_column("operation")
    columns = (
        "us", "spread", "GB/s", "% of\ncopy", "launches", "memsets,\ncopies", "host us",
        "plain\ntorch us", "its\nlaunches", "torch's\nhook us", "its\nlaunches", "x plain\ntorch", "x torch's\nhook",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    by_key = {(x.bucket, x.operation, x.implementation): x for x in rows}
    bucket = None
    for name, operation in dict.fromkeys((x.bucket, x.operation) for x in rows):
        if name != bucket:
            table.add_section()
            sizes = next(x for x in rows if x.bucket == name)
            table.add_row(f"[bold]{name}[/bold] ({sizes.numel / 1e6:.2f} M elements)")
            table.add_section()
            bucket = name
        kernels, plain, hook = (by_key.get((name, operation, x)) for x in (KERNELS, COMPOSITION, TORCH_HOOK))
        table.add_row(operation, *_cells(kernels or plain, plain, hook))
    return table


def _cells(ours: Row | None, plain: Row | None, hook: Row | None) -> list[str]:
    if ours is None or ours.error is not None:
        first = ["failed", *[""] * 6]
    else:
        first = [f"{ours.us:.1f}", f"{ours.spread_us:.1f}", f"{ours.gb_per_s:.0f}", f"{ours.percent_of_copy:.1f}"]
        first += [_count(ours.launches), _count(ours.memory_operations), f"{ours.host_us:.0f}"]
    others = [cell for x in (plain, hook) for cell in (_microseconds(x), _count(x.launches if x else None))]
    return first + others + [_ratio(x, ours) for x in (plain, hook)]


def _microseconds(x: Row | None) -> str:
    if x is None:
        return ""
    return "failed" if x.error else f"{x.us:.1f}"


def _count(number: int | None) -> str:
    return "" if number is None else str(number)


def _ratio(other: Row | None, ours: Row | None) -> str:
    if other is None or ours is None or other is ours or not other.us or not ours.us:
        return ""
    return f"{other.us / ours.us:.1f}"


def steps_table(steps: dict[str, list[dict[str, Any]]]) -> Table:
    table = Table(title="a DDP step of a few Linear layers")
    for column in ("ranks", "hook"):
        table.add_column(column)
    for column in ("step ms", "no_sync ms", "added ms"):
        table.add_column(column, justify="right")
    for ranks, rows in steps.items():
        for x in rows:
            numbers = (f"{x[name]:.3f}" for name in ("step_ms", "no_sync_ms", "added_ms"))
            table.add_row(ranks, x["hook"], *numbers)
        table.add_section()
    return table


def waits_table(waits: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="does the host wait for the GPU in a hook call? (torch's PowerSGD does: the check sees it)")
    for column in ("hook", "", "why"):
        table.add_column(column)
    for x in waits:
        table.add_row(x["hook"], "waits" if x["waits"] else "[green]never[/green]", escape(x["waits"] or ""))
    return table


def goals_table(found: Sequence[Goal]) -> Table:
    table = Table(title="goals, of float32 buckets; bandwidths of those of 20 MB and more")
    for column in ("goal", "limit", "worst", "best", "worst of", "met"):
        table.add_column(column)
    words = {True: "[green]yes[/green]", False: "[red]no[/red]", None: "not measured"}
    for x in found:
        numbers = ("" if number is None else f"{number:.2f}" for number in (x.worst, x.best))
        table.add_row(x.goal, x.limit, *numbers, x.worst_bucket or "", words[x.met])
    return table


def plot(rows: Sequence[Row], machine: dict[str, Any], path: Path) -> None:
    """Per cent of copy bandwidth of each operation on each bucket, the kernels beside plain torch."""
    mpl.use("Agg")
    rows = [x for x in rows if x.error is None]
    operations = list(dict.fromkeys(x.operation for x in rows))
    buckets = list(dict.fromkeys(x.bucket for x in rows))
    size = (4 + 1.4 * len(buckets), 2.5 + 0.35 * len(operations))
    figure, both = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    for axes, implementation in zip(both, (KERNELS, COMPOSITION), strict=True):
        _heat_map(axes, [x for x in rows if x.implementation == implementation], operations, buckets)
        axes.set_title(implementation)
    figure.suptitle(
        f"{machine['card']}: per cent of the bandwidth of a large copy, {machine['copy_gb_per_s']:.0f} GB/s"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _heat_map(axes: Axes, rows: Iterable[Row], operations: list[str], buckets: list[str]) -> None:
    values = [[float("nan")] * len(buckets) for _ in operations]
    for x in rows:
        i, j = operations.index(x.operation), buckets.index(x.bucket)
        values[i][j] = x.percent_of_copy
        color = "black" if x.percent_of_copy > 60 else "white"
        axes.text(j, i, f"{x.percent_of_copy:.0f}", ha="center", va="center", color=color, fontsize=8)
    axes.imshow(values, vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(len(buckets)), [x.replace(", ", "\n") for x in buckets], rotation=90, fontsize=8)
    axes.set_yticks(range(len(operations)), operations)
