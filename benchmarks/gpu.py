"""The kernels and hooks on this machine's GPU: first whether they are right, then how fast they are.

    python -m benchmarks.kernels --gpu

Prints tables, and writes gpu.json and gpu.png to the results folder. It stops adding buckets when ten minutes are
nearly over.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console

from benchmarks import gpu_report as report
from benchmarks.gpu_cases import FAMILIES
from benchmarks.gpu_hooks import OURS, TORCHS, Row as Result, host_waits, one_rank, step_times, two_ranks
from benchmarks.gpu_shapes import BucketShapes, all_buckets
from benchmarks.gpu_timing import GpuTimer, copy_bandwidth, launch_interval, measure

ROOT = Path(__file__).parents[1]
TESTS_TIMEOUT = 300  # seconds
BUDGET = 480  # seconds from the start after which no further bucket is begun
REPEATS, QUICK_REPEATS = 30, 10


def run(out: Path, quick: bool) -> None:
    """Test, measure, report. Ends the program with a message if there is no GPU or its tests fail."""
    start = time.monotonic()
    if not torch.cuda.is_available():
        sys.exit("kernels: --gpu needs a CUDA device, and torch finds none here")
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("kernels: TRITON_INTERPRET is 1; with --gpu it must not be set: the interpreter is no GPU")
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print("tests/kernels on the GPU ...")
    run_tests()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    out.mkdir(parents=True, exist_ok=True)
    failures = Measurement(GpuTimer(device), console, out, start + BUDGET).run(quick)
    if failures:
        sys.exit("kernels: " + "\n".join(failures))


def run_tests() -> None:
    """No number from a kernel that is wrong."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "tests/kernels"]
    try:
        code = subprocess.run(command, cwd=ROOT, timeout=TESTS_TIMEOUT, check=False).returncode
    except subprocess.TimeoutExpired:
        sys.exit(f"kernels: tests/kernels took more than {TESTS_TIMEOUT} s on this GPU; nothing was measured")
    if code:
        sys.exit("kernels: tests/kernels fail on this GPU (above); nothing was measured")


class Measurement:
    """All that is measured, and written down anew after each part: a run that is cut off leaves what it has."""

    def __init__(self, timer: GpuTimer, console: Console, out: Path, deadline: float) -> None:
        self.timer, self.console, self.out, self.deadline = timer, console, out, deadline
        self.machine: dict[str, Any] = {}
        self.copy_bandwidth = self.launch_interval = 0.0  # bytes a second, and seconds
        self.rows: list[report.Row] = []
        self.waits: list[Result] = []
        self.steps: dict[str, list[Result]] = {}
        self.skipped: list[str] = []
        self.failures: list[str] = []

    def run(self, quick: bool) -> list[str]:
        """Returns what failed."""
        self.copy_bandwidth, self.launch_interval = copy_bandwidth(self.timer), launch_interval(self.timer)
        self.machine = describe(self.timer.device)
        self.machine |= {"copy_gb_per_s": self.copy_bandwidth * 1e-9, "launch_us": self.launch_interval * 1e6}
        repeats = QUICK_REPEATS if quick else REPEATS
        buckets = all_buckets(quick)
        with one_rank():
            with self._part("host waits"):
                self.waits = host_waits(buckets[0], self.timer)
                self.console.print(report.waits_table(self.waits))
            with self._part("steps of one rank"):
                self.steps["1, nccl"] = step_times(OURS | TORCHS, self.timer.device)
            with self._part("steps of two ranks"):
                self.steps["2, gloo"] = two_ranks()
            self.console.print(report.steps_table(self.steps))
            for shapes in buckets:
                if time.monotonic() > self.deadline:
                    self.skipped.append(shapes.name)
                    continue
                self.console.print(f"{shapes.name}: {len(shapes.shapes)} parameters ...")
                for family in FAMILIES:
                    with self._part(f"{shapes.name}, {family}"):
                        self.rows += self._rows(shapes, family, repeats)
        self._show()
        return self._failures()

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """What fails in one part is said at the end; the others are measured."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - of whatever kind
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
            self.console.print_exception()
        self.write()

    def _show(self) -> None:
        self.console.print(report.operations_table(self.rows, self.machine))
        self.console.print(report.goals_table(self._goals()))
        if self.rows:
            report.plot(self.rows, self.machine, self.out / "gpu.png")
        self.console.print(f"Results: {self.out / 'gpu.json'}   Plot: {self.out / 'gpu.png'}")
        if self.skipped:
            self.console.print(f"No time was left for: {'; '.join(self.skipped)}")

    def _rows(self, shapes: BucketShapes, family: str, repeats: int) -> list[report.Row]:
        cases = FAMILIES[family](shapes, self.timer.device)
        measured = measure(cases, self.timer, repeats)
        return [report.row(shapes, *pair, self.copy_bandwidth) for pair in zip(cases, measured, strict=True)]

    def _goals(self) -> list[report.Goal]:
        return report.goals(self.rows, self.copy_bandwidth, self.launch_interval)

    def write(self) -> None:
        results = {
            "machine": self.machine,
            "goals": [asdict(x) for x in self._goals()],
            "host_waits": self.waits,
            "steps": self.steps,
            "skipped": self.skipped,
            "failures": self.failures,
            "rows": [asdict(x) for x in self.rows],
        }
        (self.out / "gpu.json").write_text(json.dumps(results, indent=2) + "\n")

    def _failures(self) -> list[str]:
        failed = [f"{x.bucket}, {x.operation} ({x.implementation}): {x.error}" for x in self.rows if x.error]
        waiting = [x["hook"] for x in self.waits if x["waits"] and x["hook"].startswith("commhooks")]
        return self.failures + failed + [f"the host waits in {name}" for name in waiting]


def describe(device: torch.device) -> dict[str, Any]:
    return {
        "card": torch.cuda.get_device_name(device),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.partition("\n")[0].strip()
