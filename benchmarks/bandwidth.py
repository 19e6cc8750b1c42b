"""Step time against link rate: every hook on the link rig, beside plain DDP, torch's own hooks, and no communication.

    python -m benchmarks.bandwidth            (or with all other benchmarks: make bench)

First the hooks' tests: a hook that fails them gets no number. Then one launch of processes for each number of nodes and
link rate, with all hooks in it, measured in turn. Results go to FOLDER/bandwidth.jsonl, one record a launch; an
interrupted run is continued. With --quick, two launches of short turns.
"""

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import gate
from benchmarks.bandwidth_numbers import summarize
from benchmarks.bandwidth_rank import NO_SYNC
from benchmarks.bandwidth_report import launch_table
from benchmarks.namespaces import isolate
from benchmarks.records import QUICK_RESULTS, RESULTS, ROOT, Records
from benchmarks.rig import Rig, RigError, parse_rate, positive
from benchmarks.variants import VARIANTS

RATES = ("10mbit", "50mbit", "100mbit", "500mbit", "1gbit", "none")
HOOKS = tuple(name for name in VARIANTS if name != "topk-warmup")  # whose steps change as it goes on
ROUNDS = 3
SLOT_SECONDS, QUICK_SLOT_SECONDS = 1.0, 0.3
LOGS = ROOT / "build" / "bandwidth"
TIMEOUT = 1200  # seconds a launch
ATTEMPTS = 3  # of a launch, each without the hook that made the last one fail

Slots = list[dict[str, Any]]


@dataclass(frozen=True)
class Launch:
    """One group of processes."""

    nodes: int
    ranks_per_node: int
    rate: str

    def __str__(self) -> str:
        ranks = "rank" if self.ranks_per_node == 1 else "ranks"
        return f"{self.nodes} nodes x {self.ranks_per_node} {ranks} at {self.rate}"

    @property
    def case(self) -> dict[str, Any]:
        return {"nodes": self.nodes, "ranks_per_node": self.ranks_per_node, "rate": self.rate}

    @property
    def weight(self) -> float:
        """About how long it takes, beside an unthrottled launch: dense gradients crawl over slow links."""
        rate = parse_rate(self.rate)
        return 1 + 2e7 / rate if rate else 1


def launches(*, quick: bool, rates: list[str] | None, nodes: list[int] | None) -> list[Launch]:
    """All rates on two nodes of one rank, some on four ranks; or those that are asked for."""
    if quick:
        plan = [Launch(2, 1, rate) for rate in rates or ("100mbit", "none")]
    else:
        plan = [Launch(2, 1, rate) for rate in rates or RATES]
        plan += [Launch(*shape, rate) for shape in ((4, 1), (2, 2)) for rate in rates or ("100mbit", "none")]
    return [launch for launch in plan if nodes is None or launch.nodes in nodes]


class Launcher:
    """Runs launches, each in so many rounds of turns of so many seconds."""

    def __init__(self, rounds: int, slot_seconds: float) -> None:
        self.rounds, self.slot_seconds = rounds, slot_seconds

    def measure(self, launch: Launch, names: list[str], tick: Callable[[float], None]) -> dict[str, Any]:
        """What goes into the launch's record. `tick` is told the finished fraction.

        Raises:
            RigError: it failed without any hook, or again and again.
        """
        with Rig(launch.nodes, launch.ranks_per_node, parse_rate(launch.rate), isolated=True) as rig:
            link_rate = rig.measure_rate()
            lines, failed = self._run(rig, launch, names, tick)
        return {
            "link_rate": link_rate,
            "variants": summarize((line for line in lines if "variant" in line), link_rate),
            "refused": {line["refused"]: line["why"] for line in lines if "refused" in line},
            "failed": failed,
        }

    def _run(
        self, rig: Rig, launch: Launch, names: list[str], tick: Callable[[float], None]
    ) -> tuple[Slots, dict[str, str]]:
        LOGS.mkdir(parents=True, exist_ok=True)
        stem = f"{launch.nodes}x{launch.ranks_per_node}-{launch.rate}"
        out = LOGS / f"{stem}.jsonl"
        failed: dict[str, str] = {}
        for attempt in range(1, ATTEMPTS + 1):
            left = [name for name in names if name not in failed]
            command = [sys.executable, "-m", "benchmarks.bandwidth_rank", "--variants", *left]
            command += [f"--rounds={self.rounds}", f"--slot-seconds={self.slot_seconds}", f"--out={out}"]
            turns = len(left) * (self.rounds + 2)
            out.write_text("")
            log = LOGS / f"{stem}-{attempt}.log"
            try:
                rig.run(command, timeout=TIMEOUT, log=log, on_tick=partial(_tick, out, turns, tick))
            except RigError:
                culprit = _last_turn(out)
                if culprit in (None, NO_SYNC, "plain") or attempt == ATTEMPTS:
                    raise
                failed[culprit] = _last_error(log)
            else:
                return _lines(out), failed
        raise AssertionError("the last attempt returns or raises")


def _tick(out: Path, turns: int, tick: Callable[[float], None]) -> None:
    tick(sum("at" in line for line in _lines(out)) / turns)


def _last_turn(out: Path) -> str | None:
    turns: list[str] = [line["at"] for line in _lines(out) if "at" in line]
    return turns[-1] if turns else None


def _lines(out: Path) -> Slots:
    found = []
    for text in out.read_text().splitlines():
        with suppress(json.JSONDecodeError):  # the last line, while it is written
            found.append(json.loads(text))
    return found


def _last_error(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if "Error" in line and not line.startswith(" ")]
    return (errors or lines or ["it said nothing"])[-1][:200]


def green_hooks(records: Records, console: Console) -> set[str]:
    """Run the hooks' tests, and say which hooks are left out. A run that is continued tests anew."""
    console.print("tests of every hook ...")
    found = gate.run_tests()
    for hook, outcome in found.items():
        measured = {"passed": outcome.passed, "failed": outcome.failed, "reason": outcome.reason}
        records.add({"tests": hook}, measured | {"green": outcome.green})
        if not outcome.green:
            console.print(f"{hook} gets no number: {outcome.reason}")
    return {hook for hook, outcome in found.items() if outcome.green}


def run(records: Records, plan: list[Launch], hooks: list[str], launcher: Launcher, console: Console) -> list[str]:
    """Measure what the records lack. Returns what failed, in words."""
    green = green_hooks(records, console)
    names = [NO_SYNC, *(name for name in hooks if VARIANTS[name].hook in {None, *green})]
    troubles = []
    columns = (TextColumn("{task.description:36}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, refresh_per_second=1, disable=not console.is_terminal) as progress:
        task = progress.add_task("bandwidth", total=sum(launch.weight for launch in plan))
        done = 0.0
        for number, launch in enumerate(plan, 1):
            progress.update(task, description=str(launch), completed=done)
            if not records.has(launch.case):
                try:
                    measured = launcher.measure(launch, names, partial(_show, progress, task, done, launch.weight))
                except (RigError, SubprocessError, OSError) as error:
                    troubles.append(f"{launch}: {error}")
                else:
                    records.add(launch.case, measured)
                    console.print(launch_table(records.records[-1]).rich())
            done += launch.weight
            console.print(f"[{number}/{len(plan)}] {launch}", markup=False)
    return troubles


def _show(progress: Progress, task: TaskID, done: float, weight: float, fraction: float) -> None:
    progress.update(task, completed=done + weight * fraction)


def rate_text(text: str) -> str:
    """A rate as it is written, if it is one."""
    parse_rate(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two launches of short turns: a trial, no measurement")
    parser.add_argument("--out", type=Path, help=f"folder (default: benchmarks/{RESULTS.name}; --quick: build/quick)")
    parser.add_argument("--rates", nargs="+", type=rate_text, help=f"of each link (default: {' '.join(RATES)})")
    parser.add_argument("--nodes", nargs="+", type=positive, help="only with so many nodes (default: 2 4)")
    parser.add_argument("--hooks", nargs="+", choices=VARIANTS, default=HOOKS, help="to compare (default: all)")
    args = parser.parse_args()
    plan = launches(quick=args.quick, rates=args.rates, nodes=args.nodes)
    if not plan:
        parser.error(f"--nodes is {args.nodes}; it must be some of 2 4, and with --quick 2")

    if reason := isolate():
        sys.exit(f"bandwidth: no link rig, and so no numbers: {reason}")
    slot_seconds = QUICK_SLOT_SECONDS if args.quick else SLOT_SECONDS
    settings = {"quick": args.quick, "rates": args.rates, "nodes": args.nodes, "hooks": args.hooks}
    settings |= {"rounds": ROUNDS, "slot_seconds": slot_seconds}
    records = Records(args.out or (QUICK_RESULTS if args.quick else RESULTS), "bandwidth", settings)
    console = Console(width=None if sys.stdout.isatty() else 200)
    try:
        troubles = run(records, plan, list(args.hooks), Launcher(ROUNDS, slot_seconds), console)
    except KeyboardInterrupt:
        sys.exit(130)
    if troubles:
        sys.exit("bandwidth: the same command tries these again:\n" + "\n".join(troubles))
    records.finish()
    console.print(f"Results: {records.path}")


if __name__ == "__main__":
    main()
