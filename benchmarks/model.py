"""The cost on paper: a latency and bandwidth model of every collective, fitted, checked, and projected to large models.

    python -m benchmarks.model [--quick] [--out FOLDER]

First it measures gloo's collectives on the rig, at several sizes, numbers of nodes and link rates. The model is fitted
on some of these runs and checked on the others, and on the step times that benchmarks.bandwidth left in FOLDER. Last
comes the projection. Results go to FOLDER/model.jsonl; an interrupted run is continued.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import model_projection
from benchmarks.collectives import COLLECTIVES, HIERARCHICAL, QUICK_SIZES, SIZES, measure
from benchmarks.model_checks import FITTED_RATES, GOAL, Check, check_collectives, check_steps, fit_all, is_fitted
from benchmarks.model_costs import Cost
from benchmarks.namespaces import isolate
from benchmarks.records import QUICK_RESULTS, RESULTS, Record, Records, read
from benchmarks.rig import Rig, RigError, parse_rate
from benchmarks.tables import Table
from benchmarks.variants import VARIANTS

BENCHMARK = "model"
SHAPES = ((2, 1), (4, 1), (2, 2))  # nodes, ranks a node
RATES = ("100mbit", "1gbit", "none")
QUICK = (((2, 1), "100mbit"), ((2, 1), "none"), ((2, 1), "1gbit"))
SHORT = 1e-3  # seconds; what takes less is the scheduler's business as much as the network's

HOW = """\
`python -m benchmarks.model`. Seconds of a collective = alpha x rounds + the longer of beta x bytes and share x
(bytes x 8 / link rate - 1 ms, which the rig's token bucket lends). Rounds: 2 (W - 1) of an all_reduce, W - 1 of an
all_gather and of an all_to_all, log2 W of a broadcast. Bytes: those that `commhooks.comm` counts; of a broadcast
the root's. A share of 1 is perfect use of the link; the headers of TCP alone make it 1.06. Collectives of less than
1 ms are left out of the errors: there the processors' scheduler decides."""


def launches(*, quick: bool) -> list[dict[str, Any]]:
    wanted = QUICK if quick else [(shape, rate) for rate in RATES for shape in SHAPES]
    return [{"nodes": nodes, "ranks_per_node": ranks, "rate": rate} for (nodes, ranks), rate in wanted]


def run(records: Records, progress: Progress, *, quick: bool) -> None:
    """Measure the collectives that the records lack."""
    cases = launches(quick=quick)
    task = progress.add_task("collectives", total=len(cases))
    for case in cases:
        progress.update(task, description=f"collectives, {case['nodes']} x {case['ranks_per_node']} at {case['rate']}")
        if not records.has(case):
            one_a_node = case["ranks_per_node"] == 1
            collectives = COLLECTIVES if one_a_node else ("all_reduce", "all_gather", HIERARCHICAL)
            with Rig(case["nodes"], case["ranks_per_node"], parse_rate(case["rate"]), isolated=True) as rig:
                link_rate = rig.measure_rate()
                samples = measure(rig, collectives, QUICK_SIZES if quick else SIZES, lambda: None)
            records.add(case, {"link_rate": link_rate, "samples": samples})
        progress.advance(task)


def add_step_checks(records: Records, folder: Path) -> None:
    """Keep what the fitted model says of the step times in the folder, which may change later."""
    bandwidth = read(folder, "bandwidth")
    case = {"steps of": bandwidth[0]["run"] if bandwidth else None}
    if bandwidth and not records.has(case):
        rows = [
            where | {"variant": check.what, "predicted": check.predicted, "measured": check.measured}
            for where, check in check_steps(bandwidth, fit_all(_collectives(records.records)))
        ]
        records.add(case, {"rows": rows})


def _collectives(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if "rate" in record["case"]]


def section(records: Sequence[Record]) -> str:
    """The fit, its checks and the projection as a section of RESULTS.md."""
    measured = _collectives(records)
    if {record["case"]["rate"] for record in measured if is_fitted(record)} < set(FITTED_RATES):
        return f"## The cost on paper\n\nToo few launches to fit the model to.\n\n{model_projection.section()}"
    costs = fit_all(measured)
    parts = [
        "## The cost on paper",
        HOW,
        _cost_table(costs).markdown(),
        _collective_checks(measured, costs).markdown(),
        _goal_words(measured, costs),
        *_step_section(records),
        model_projection.section(),
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _cost_table(costs: dict[str, Cost]) -> Table:
    table = Table("Fitted on the launches marked below", ["collective", "alpha us", "beta ns a byte", "share"])
    for kind, cost in costs.items():
        table.rows.append([kind, f"{cost.alpha * 1e6:.0f}", f"{cost.beta * 1e9:.2f}", f"{cost.share:.2f}"])
    return table


def _long(checks: Sequence[Check]) -> list[float]:
    return [abs(check.error) for check in checks if check.measured > SHORT]


def _collective_checks(records: Sequence[Record], costs: dict[str, Cost]) -> Table:
    columns = ["launch", "fitted on", "median error %", "largest %", f"within {GOAL:.0%}"]
    table = Table("The model beside every launch", columns)
    for record in records:
        case = record["case"]
        errors = _long(check_collectives(record, costs))
        if errors:
            within = sum(x <= GOAL for x in errors)
            table.rows.append(
                [
                    f"{case['nodes']} nodes x {case['ranks_per_node']}, {case['rate']}",
                    "yes" if is_fitted(record) else "no",
                    f"{median(errors) * 100:.0f}",
                    f"{max(errors) * 100:.0f}",
                    f"{within} of {len(errors)}",
                ]
            )
    return table


def _goal_words(records: Sequence[Record], costs: dict[str, Cost]) -> str:
    errors = [x for record in records if not is_fitted(record) for x in _long(check_collectives(record, costs))]
    return f"On launches that it was not fitted on, {_words(errors)}" if errors else ""


def _words(errors: Sequence[float]) -> str:
    within = sum(x <= GOAL for x in errors)
    return (
        f"the median error is {median(errors):.0%}, the largest {max(errors):.0%}; "
        f"{within} of {len(errors)} are within {GOAL:.0%}."
    )


def _step_section(records: Sequence[Record]) -> list[str]:
    """Predicted and measured steps; nothing, if benchmarks.bandwidth has not run."""
    rows = [row for record in records if "steps of" in record["case"] for row in record["measured"]["rows"]]
    if not rows:
        return ["Whole steps were not checked: there are no records of benchmarks.bandwidth."]
    columns = ["hook", "launch", "predicted ms", "measured ms", "error"]
    table = Table("Whole steps of the GPT", columns)
    checks = [Check(row["variant"], row["predicted"], row["measured"]) for row in rows]
    for row, check in zip(rows, checks, strict=True):
        label = VARIANTS[check.what].label if check.what in VARIANTS else check.what
        launch = f"{row['nodes']} x {row['ranks_per_node']}, {row['rate']}"
        times = [f"{x * 1e3:.1f}" for x in (check.predicted, check.measured)]
        table.rows.append([label, launch, *times, f"{check.error * 100:+.0f} %"])
    text = (
        "A step is the one without communication, what the hook adds to it on an unlimited link, and what of the "
        "link's time does not overlap with backward, the executor's order played through. Of all: "
    )
    return [text + _words([abs(check.error) for check in checks]), table.markdown()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few sizes, two nodes: tries the harness")
    parser.add_argument("--out", type=Path, help=f"folder (default: benchmarks/{RESULTS.name}; --quick: build/quick)")
    args = parser.parse_args()
    if reason := isolate():
        sys.exit(f"model: no link rig, and so nothing to fit: {reason}")
    folder = args.out or (QUICK_RESULTS if args.quick else RESULTS)
    records = Records(folder, BENCHMARK, {"quick": args.quick})
    console = Console(width=None if sys.stdout.isatty() else 140)
    columns = (
        TextColumn("{task.description:36}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console, refresh_per_second=1, disable=not console.is_terminal) as progress:
            run(records, progress, quick=args.quick)
        add_step_checks(records, folder)
    except RigError as error:
        sys.exit(f"model: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    records.finish()
    model_projection.plot(folder)
    console.print(section(records.records), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
