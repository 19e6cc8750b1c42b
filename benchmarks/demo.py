"""The main job on the link rig, once for each hook: what compression gains over a slow link.

    python -m benchmarks.demo            (or: make demo)

Prints a table, and writes demo.json and demo.png to --out. Every hook trains the same model from the same start for
the same number of steps, and then on for as long as plain DDP took for them.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.records import processor
from benchmarks.rig import Rig, RigError, isolate_or_say_why, parse_rate, positive
from benchmarks.variants import VARIANTS

HOOKS = ("plain", "bf16", "powersgd", "powersgd-alternating", "torch-fp16", "torch-powersgd")
TIMEOUT = 300  # seconds for one hook
SMOOTHING = 10  # steps averaged for a point of the plot

Row = dict[str, Any]


def run_variant(rig: Rig, name: str, args: argparse.Namespace, seconds: float, tick: Callable[[float], None]) -> Row:
    """Train with one hook. `tick` is told the finished fraction, again and again."""
    out = args.out / f"demo-{name}.jsonl"
    out.write_text("")
    command = [sys.executable, "-m", "benchmarks.train", f"--variant={name}", f"--rank={args.rank}"]
    command += [f"--steps={args.steps}", f"--seconds={seconds}", f"--out={out}"]

    def on_tick() -> None:
        with out.open("rb") as file:
            file.seek(max(0, out.stat().st_size - 200))  # a step's line has fewer bytes
            lines = file.read().splitlines()
        last = json.loads(lines[-1]) if lines and lines[-1].startswith(b"{") and lines[-1].endswith(b"}") else {}
        if "step" in last:
            tick(min(last["step"] / args.steps, last["seconds"] / seconds if seconds else 1.0, 1.0))

    rig.run(command, timeout=TIMEOUT, log=args.out / f"demo-{name}.log", on_tick=on_tick)
    *steps, results = map(json.loads, out.read_text().splitlines())
    variant = VARIANTS[name]
    return {"hook": variant.label, "bucket_cap_mb": variant.bucket_cap_mb, **results, "steps": steps}


def summarize(rows: list[Row], args: argparse.Namespace, link_rate: float, isolated: bool) -> dict[str, Any]:
    """What goes into demo.json: the machine, and one object a hook."""
    no_communication = median(row["no_communication_ms"] for row in rows)
    for row in rows:
        on_the_link = row["tx_bytes_per_step"] * 8 / link_rate * 1e3
        row["floor_ms"] = max(no_communication, on_the_link)
    machine = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nodes": args.nodes,
        "ranks_per_node": args.ranks_per_node,
        "link": "namespaces" if isolated else "loopback, unthrottled",
        "link_rate_asked": args.rate if isolated else None,
        "link_rate_measured": link_rate,
        "no_communication_ms": no_communication,
        "steps": args.steps,
        "rank": args.rank,
    }
    return {"machine": machine, "hooks": [{k: v for k, v in row.items() if k != "steps"} for row in rows]}


def table(summary: dict[str, Any], seconds: float) -> Table:
    """The summary for people."""
    machine, hooks = summary["machine"], summary["hooks"]
    title = (
        f"{machine['nodes']} nodes x {machine['ranks_per_node']} rank, "
        f"{machine['link_rate_measured'] / 1e6:.0f} Mbit/s measured, "
        f"{machine['no_communication_ms']:.0f} ms a step without communication; PowerSGD at rank {machine['rank']}"
    )
    result = Table(title=title)
    result.add_column("hook")
    for column in (
        "bucket\nMB",
        "step\nms",
        "floor\nms",
        "step /\nfloor",
        "sent a\nstep MB",
        "x plain\nDDP",
        "x bf16",
        f"loss after\n{machine['steps']} steps",
        f"loss after\n{seconds:.0f} s",
    ):
        result.add_column(column, justify="right")
    step_ms = {row["hook"]: row["step_ms"] for row in hooks}
    bf16_ms = step_ms.get(VARIANTS["bf16"].label)
    for row in hooks:
        result.add_row(
            row["hook"],
            f"{row['bucket_cap_mb']:g}",
            f"{row['step_ms']:.0f}",
            f"{row['floor_ms']:.0f}",
            f"{row['step_ms'] / row['floor_ms']:.2f}",
            f"{row['tx_bytes_per_step'] / 1e6:.3f}",
            f"{step_ms[VARIANTS['plain'].label] / row['step_ms']:.1f}",
            f"{bf16_ms / row['step_ms']:.1f}" if bf16_ms else "",
            f"{row['loss']:.3f}",
            f"{row['loss_same_time']:.3f}",
        )
    return result


def plot(rows: list[Row], path: Path) -> None:
    """Training loss against time, a moving average."""
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for row in rows:
        losses = torch.tensor([step["loss"] for step in row["steps"]])
        seconds = [step["seconds"] for step in row["steps"]]
        axes.plot(seconds[SMOOTHING - 1 :], losses.unfold(0, SMOOTHING, 1).mean(1), label=row["hook"])
    axes.set(xlabel="seconds of training", ylabel=f"training loss (mean of {SMOOTHING} steps)")
    axes.legend()
    figure.savefig(path, dpi=150)


def _show(progress: Progress, task: TaskID, fraction: float) -> None:
    progress.update(task, completed=fraction)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=positive, default=2)
    parser.add_argument("--ranks-per-node", type=positive, default=1)
    parser.add_argument(
        "--rate", type=parse_rate, default="100mbit", help="of each link, or none (default: %(default)s)"
    )
    parser.add_argument("--rank", type=positive, default=4, help="of PowerSGD's factors (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=40, help="to compare losses after (default: %(default)s)")
    parser.add_argument("--hooks", nargs="+", choices=VARIANTS, default=HOOKS, help="to compare (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for results (default: %(default)s)")
    args = parser.parse_args()

    if args.hooks[0] != "plain":
        parser.error(f"--hooks begins with {args.hooks[0]}; it must begin with plain: it says how long the others have")
    if args.steps < SMOOTHING:
        parser.error(
            f"--steps is {args.steps}; it must be at least {SMOOTHING}, the steps that a point of the plot averages"
        )
    variants = {name: VARIANTS[name] for name in args.hooks}

    isolated = isolate_or_say_why()
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 120)
    columns = (TextColumn("{task.description:32}"), BarColumn(), TimeElapsedColumn())
    rows: list[Row] = []
    seconds = 0.0  # of plain DDP, which comes first
    try:
        with (
            Rig(args.nodes, args.ranks_per_node, args.rate, isolated=isolated) as rig,
            Progress(*columns, console=console, refresh_per_second=1) as progress,  # drawing takes time from the ranks
        ):
            link_rate = rig.measure_rate()
            tasks = {name: progress.add_task(variant.label, total=1, start=False) for name, variant in variants.items()}
            for name, task in tasks.items():
                progress.start_task(task)
                tick = partial(_show, progress, task)
                rows.append(run_variant(rig, name, args, seconds, tick))
                progress.update(task, completed=1)
                progress.stop_task(task)
                seconds = seconds or rows[0]["steps"][-1]["seconds"]
    except RigError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)

    summary = summarize(rows, args, link_rate, isolated)
    (args.out / "demo.json").write_text(json.dumps(summary, indent=2) + "\n")
    plot(rows, args.out / "demo.png")
    console.print(table(summary, seconds))
    console.print(f"Results: {args.out / 'demo.json'}   Loss against time: {args.out / 'demo.png'}")


if __name__ == "__main__":
    main()
