"""All benchmarks, one after the other, and then the report.

    python -m benchmarks.bench            (or: make bench; with --quick, make bench-quick)

An interrupted run is continued by the same command. What one benchmark prints goes to build/bench/; one that fails does
not keep the others from being run.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from benchmarks.records import QUICK_RESULTS, RESULTS, ROOT, Records

LOGS = ROOT / "build" / "bench"
COUNT = re.compile(r"\[(\d+)/(\d+)\]")  # how far a benchmark says it is
TIMEOUT = 3600  # seconds for one benchmark
GRACE = 30  # seconds to end in, after an interrupt


@dataclass(frozen=True)
class Part:
    """One benchmark: the arguments of a whole run and of a quick one, and the seconds that they take on two cores."""

    name: str
    arguments: tuple[str, ...]
    quick_arguments: tuple[str, ...]
    seconds: float
    quick_seconds: float

    def command(self, out: Path, *, quick: bool) -> list[str]:
        arguments = self.quick_arguments if quick else self.arguments
        # Relative: the command is written into the records.
        folder = out.relative_to(ROOT) if out.is_relative_to(ROOT) else out
        return [sys.executable, "-m", f"benchmarks.{self.name}", *arguments, "--out", str(folder)]

    def expected(self, *, quick: bool) -> float:
        return self.quick_seconds if quick else self.seconds


# In this order: the model's predictions are checked against the bandwidth benchmark's step times.
PARTS = (
    Part("bandwidth", (), ("--quick",), 1000, 90),
    Part("convergence", (), ("--quick",), 900, 90),
    Part("kernels", ("--compile",), ("--compile", "--target", "sm_90"), 50, 25),
    Part("model", (), ("--quick",), 150, 40),
)


class TimeLeft(ProgressColumn):
    """What the tasks that are not finished will still take, as far as they have come."""

    def render(self, task: Task) -> Text:
        left = (task.total or 0) - task.completed
        return Text("" if task.finished else f"{left / 60:.0f} min left")


def run_part(command: list[str], log: Path, timeout: float, tick: Callable[[float, str], None]) -> int | None:
    """The exit status, or None after `timeout` seconds. `tick` hears the seconds so far and the log's end.

    Raises:
        KeyboardInterrupt: as it came, after the benchmark has ended.
    """
    start = time.monotonic()
    with log.open("w") as file, ExitStack() as stack:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        stack.callback(_end, process)
        while process.poll() is None:
            past = time.monotonic() - start
            if past > timeout:
                return None
            tick(past, _tail(log))
            time.sleep(0.5)
        return process.returncode


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End what still runs. A Ctrl-C has reached it too, as it comes to the terminal's whole process group."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tail(log: Path, size: int = 4000) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - size))
        return file.read().decode(errors="replace")


def progress_of(tail: str, past: float, expected: float) -> float:
    """The finished fraction: what the benchmark says last, or at least the time's share; never all of it."""
    counts = COUNT.findall(tail)
    said = int(counts[-1][0]) / int(counts[-1][1]) if counts else 0.0
    return min(0.99, max(said, min(past / expected, 0.95)))


class Bench:
    """Runs benchmarks, and shows how far they are: each one, and all."""

    def __init__(self, records: Records, out: Path, progress: Progress, *, quick: bool) -> None:
        self.records, self.out, self.progress, self.quick = records, out, progress, quick
        self._all = progress.add_task("all", total=sum(part.expected(quick=quick) for part in PARTS))

    def run(self, part: Part) -> str | None:
        """Run the benchmark, unless the records have it. Returns what failed, in words."""
        expected, before = part.expected(quick=self.quick), self.progress.tasks[self._all].completed
        show = partial(self._show, self.progress.add_task(part.name, total=expected), before, expected)
        failure = None
        if not self.records.has({"part": part.name}):
            LOGS.mkdir(parents=True, exist_ok=True)
            log = LOGS / f"{part.name}{'-quick' if self.quick else ''}.log"
            start = time.monotonic()
            status = run_part(part.command(self.out, quick=self.quick), log, TIMEOUT, show)
            seconds = time.monotonic() - start
            if status == 0:
                self.records.add({"part": part.name}, {"seconds": seconds})
                self.progress.console.print(f"{part.name}: {seconds:.0f} s")
            else:
                said = f"took more than {TIMEOUT} s" if status is None else f"ended with status {status}"
                failure = f"{part.name} {said} (see {log.relative_to(ROOT)})"
        self._show_share(show.args[0], before, expected, 1.0)
        return failure

    def _show(self, task: TaskID, before: float, expected: float, past: float, tail: str) -> None:
        self._show_share(task, before, expected, progress_of(tail, past, expected))

    def _show_share(self, task: TaskID, before: float, expected: float, share: float) -> None:
        self.progress.update(task, completed=expected * share)
        self.progress.update(self._all, completed=before + expected * share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a trial of everything, in under five minutes")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: benchmarks/results; --quick: build/quick")
    args = parser.parse_args()
    out = (args.out or (QUICK_RESULTS if args.quick else RESULTS)).resolve()
    records = Records(out, "bench", {"quick": args.quick})
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        columns = (TextColumn("{task.description:12}"), BarColumn(), TimeElapsedColumn(), TimeLeft())
        with Progress(*columns, console=console, refresh_per_second=1) as progress:  # drawing takes time from the ranks
            bench = Bench(records, out, progress, quick=args.quick)
            failures = [failure for failure in map(bench.run, PARTS) if failure]
        report = [sys.executable, "-m", "benchmarks.report", "--out", str(out)]
        status = subprocess.run(report, cwd=ROOT, check=False).returncode
    except KeyboardInterrupt:
        sys.exit(130)
    if status:
        failures.append(f"the report ended with status {status}")
    if failures:
        sys.exit("bench: the same command tries these again:\n" + "\n".join(failures))
    records.finish()


if __name__ == "__main__":
    main()
