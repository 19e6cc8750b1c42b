"""What compression costs in steps and gains in time: two tasks, several seeds, every hook, against bf16 all-reduce.

    python -m benchmarks.convergence [--quick] [--out FOLDER]

The learning rate is tuned on bf16 alone. Losses do not depend on the link, so runs train on loopback; a step's time
is measured on rate-limited links, the hooks in turn, and seconds to a loss are derived from both. Two whole runs on
a link check that. Hooks that fail their tests are left out. Results go to FOLDER/convergence.jsonl; an interrupted
run is continued. Then the tables are printed, and plots are written to FOLDER.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.bandwidth import green_hooks
from benchmarks.convergence_curves import final_loss, plain_numbers
from benchmarks.convergence_rank import VARIANTS
from benchmarks.convergence_report import plot, section
from benchmarks.convergence_task import BASELINE, BASELINES, look_up
from benchmarks.records import QUICK_RESULTS, RESULTS, Records
from benchmarks.rig import Rig, RigError, isolate_or_say_why, parse_rate
from benchmarks.tasks import TASKS

__all__ = ["main", "section"]

BENCHMARK = "convergence"
SEEDS = (0, 1, 2)
TUNING_SEED = 1000  # none of those compared
RATES = ("100mbit", "1gbit")
CHECKED_TASK, CHECKED_RATE = "gpt", "100mbit"
ROUNDS = 4
QUICK_VARIANTS = ("bf16", "powersgd-4", "alternating-4", "topk-1", "topk-1-control")
TIMEOUT = 1800  # seconds for one launch of processes

Job = dict[str, Any]
Case = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    seeds: tuple[int, ...]
    variants: tuple[str, ...]
    rates: tuple[str, ...]
    rounds: int
    shortening: int  # of all runs, by this factor
    grid: slice  # of a task's learning rates

    def steps(self, task: str, variant: str) -> int:
        """Baselines and controls run for the task's steps; hooks may take longer, to reach the baseline's loss."""
        steps = TASKS[task].steps // self.shortening
        patient = variant not in BASELINES and not VARIANTS[variant].control
        every = TASKS[task].evaluate_every
        return round(steps * TASKS[task].patience / every) * every if patient else steps

    def without_red(self, green: set[str]) -> "Plan":
        """Only the hooks that have passed their tests.

        Raises:
            RigError: bf16 has not, to which all others are compared.
        """
        passed = {x for x in self.variants if (hook := VARIANTS[x].hook) is None or _name(hook) in green}
        if BASELINE not in passed:
            raise RigError("bf16 fails its tests, so there is nothing to compare with")
        return replace(self, variants=tuple(x for x in self.variants if x in passed))

    def variants_of(self, task: str) -> list[str]:
        return [x for x in self.variants if VARIANTS[x].only in {None, task}]

    def timed(self, task: str) -> list[str]:
        return list(dict.fromkeys(VARIANTS[x].timed_as or x for x in self.variants_of(task)))


def _name(hook: Callable[..., Any]) -> str:
    return hook.__name__.removesuffix("_hook")


FULL = Plan(SEEDS, tuple(VARIANTS), RATES, ROUNDS, shortening=1, grid=slice(None))
QUICK = Plan(SEEDS[:1], QUICK_VARIANTS, RATES[:1], rounds=2, shortening=6, grid=slice(1, 3))


class Runner:
    """Runs jobs on a rig and keeps what each one measured as soon as it is done."""

    def __init__(self, records: Records, progress: Progress, *, isolated: bool) -> None:
        self.records, self.progress, self.isolated = records, progress, isolated

    def train(self, title: str, cases: list[Case], rate: str | None = None) -> None:
        """Training runs, on loopback or on a link: all in one launch of processes."""
        jobs = [{"do": "train"} | {name: case[name] for name in TRAIN_ARGUMENTS} for case in cases]
        self._run(title, cases, jobs, rate, plain_numbers)

    def time(self, title: str, case: Case, variants: list[str], rounds: int) -> None:
        job = {"do": "time", "task": case["task"], "variants": variants, "rounds": rounds}
        self._run(title, [case], [job], case["rate"], lambda seconds: {"seconds": plain_numbers(seconds)})

    def _run(
        self, title: str, cases: list[Case], jobs: list[Job], rate: str | None, keep: Callable[[Any], dict[str, Any]]
    ) -> None:
        missing = [i for i, case in enumerate(cases) if not self.records.has(case)]
        task = self.progress.add_task(title, total=len(cases), completed=len(cases) - len(missing))
        if not missing:
            return
        with ExitStack() as stack:
            nodes = (1, 2) if rate is None else (2, 1)
            rig = stack.enter_context(Rig(*nodes, parse_rate(rate or "none"), isolated=self.isolated))
            extra = {"link_rate": rig.measure_rate()} if rate else {}
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            plan, out, log = folder / "plan.jsonl", folder / "out.jsonl", folder / "log"
            plan.write_text("".join(json.dumps(jobs[i]) + "\n" for i in missing))
            out.touch()
            done = 0

            def collect() -> None:
                nonlocal done
                for line in out.read_text().splitlines(keepends=True)[done:]:
                    if line.endswith("\n"):  # else it is still being written
                        answer = json.loads(line)
                        self.records.add(cases[missing[answer["index"]]], keep(answer["result"]) | extra)
                        self.progress.advance(task)
                        done += 1

            command = [sys.executable, "-m", "benchmarks.convergence_rank", f"--plan={plan}", f"--out={out}"]
            try:
                rig.run(command, timeout=TIMEOUT, log=log, on_tick=collect)
            except RigError as error:
                raise RigError(f"{error}\n{log.read_text()[-2000:]}") from None
            finally:
                collect()


TRAIN_ARGUMENTS = ("task", "variant", "seed", "lr", "steps")


def run(runner: Runner, plan: Plan) -> None:
    """All parts; each one needs the results of those before it."""
    rates = {task: tune(runner, plan, task) for task in TASKS}
    for task in TASKS:
        cases = [
            train_case("train", plan, task, variant, seed, rates[task])
            for seed in plan.seeds
            for variant in plan.variants_of(task)
        ]
        runner.train(f"{task}: train", cases)
    if not runner.isolated:
        return  # there are no links, and so no times
    for task in TASKS:
        for rate in plan.rates:
            case = {"part": "time", "task": task, "rate": rate}
            runner.time(f"{task}: step times, {rate}", case, plan.timed(task), plan.rounds)
    check(runner, plan, rates[CHECKED_TASK])


def train_case(part: str, plan: Plan, task: str, variant: str, seed: int, lr: float) -> Case:
    steps = plan.steps(task, variant)
    return {"part": part, "task": task, "variant": variant, "seed": seed, "lr": lr, "steps": steps}


def tune(runner: Runner, plan: Plan, task: str) -> float:
    """The learning rate of the grid with which bf16 has the lowest loss at its end."""
    grid = TASKS[task].learning_rates[plan.grid]
    cases = [train_case("tune", plan, task, BASELINE, TUNING_SEED, lr) for lr in grid]
    runner.train(f"{task}: tune on bf16", cases)
    losses = {r["case"]["lr"]: final_loss(r["measured"]) for r in runner.records.records if r["case"] in cases}
    return min(losses, key=lambda lr: losses[lr])


def check(runner: Runner, plan: Plan, lr: float) -> None:
    """bf16 and the best hook once more, on a link: as far as bf16's loss was on loopback, and a little farther."""
    task = look_up(runner.records.records, CHECKED_TASK)
    cases = []
    for variant in dict.fromkeys((BASELINE, task.best(CHECKED_RATE) or BASELINE)):
        case = train_case("check", plan, CHECKED_TASK, variant, plan.seeds[0], lr)
        if reached := task.reached(variant, plan.seeds[0]):
            every = TASKS[CHECKED_TASK].evaluate_every
            case["steps"] = min(case["steps"], int(reached.step // every + 1) * every)
        cases.append(case | {"rate": CHECKED_RATE})
    runner.train(f"{CHECKED_TASK}: whole runs, {CHECKED_RATE}", cases, CHECKED_RATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="one seed, few hooks, short runs, no tests of hooks: a trial"
    )
    parser.add_argument(
        "--out", type=Path, help=f"folder for results (default: {RESULTS}, or with --quick {QUICK_RESULTS})"
    )
    args = parser.parse_args()
    isolated = isolate_or_say_why()
    folder = args.out or (QUICK_RESULTS if args.quick else RESULTS)
    records = Records(folder, BENCHMARK, {"quick": args.quick})
    console = Console(width=None if sys.stdout.isatty() else 120)
    times = TimeElapsedColumn(), TimeRemainingColumn()
    columns = (TextColumn("{task.description:36}"), BarColumn(), MofNCompleteColumn(), *times)
    try:
        plan = QUICK if args.quick else FULL.without_red(green_hooks(records, console))
        with Progress(*columns, console=console, refresh_per_second=1) as progress:
            run(Runner(records, progress, isolated=isolated), plan)
    except RigError as error:
        sys.exit(f"convergence: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    records.finish()
    plot(records.records, folder)
    console.print(section(records.records), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
