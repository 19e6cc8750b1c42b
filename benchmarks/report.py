"""Writes benchmarks/RESULTS.md and its plots from what the benchmarks recorded, and from nothing else.

    python -m benchmarks.report [--out FOLDER]

FOLDER holds the records; the page of another folder than benchmarks/results is written into it.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import bandwidth_report, convergence_report, kernels, model, model_projection, plots
from benchmarks.advice import advice
from benchmarks.records import RESULTS, Record, is_finished, read

HEAD = """\
# Results

Generated from recorded measurements by `python -m benchmarks.report`. `make bench` measures all anew, and appends.

## Which hook for which link, and when none

By the time to a loss, on two nodes of one rank: steps to the loss that bf16 has at the end of its run, times what a
step takes at that rate. Where several are within a tenth of the shortest time, the simplest is named first.

{advice}
By the length of a step alone, which is worth more with some hooks than with others:

{choices}
"""
LIMITS = """\
## Known limits

- gloo over TCP. NCCL, RDMA and shared memory are another matter: less time for each collective, more overlap.
- Arithmetic is a CPU's. A GPU computes steps and compression both far faster, and not by the same factor.
- Two cores are shared by all ranks, so compression on one rank takes time from the others' steps, and with four ranks
  a step without communication already waits for a core. Real nodes have cores of their own.
- Links are token buckets on virtual interfaces: no switch, no loss, latency of microseconds. Ranks of one node talk
  over its loopback.
- The models are small. Of what a hook costs, the part that does not grow with the model weighs more here.
"""


@dataclass(frozen=True)
class Part:
    """One benchmark's share of the page: its text, and its plots into a folder."""

    benchmark: str
    title: str
    section: Callable[[Sequence[Record]], str]
    plot: Callable[[Sequence[Record], Path], object]


def _plot_bandwidth(records: Sequence[Record], folder: Path) -> None:
    two = bandwidth_report.launches(records, (2, 1))
    if len(two) > 1:
        plots.step_times(two, folder / "bandwidth.png")


PARTS = (
    Part("bandwidth", "Bandwidth", bandwidth_report.section, _plot_bandwidth),
    Part("convergence", "Convergence", convergence_report.section, convergence_report.plot),
    Part("kernels", "Kernels", kernels.section, lambda *_: None),
    Part("model", "The cost on paper", model.section, lambda _, folder: model_projection.plot(folder)),
)


def page(folder: Path, beside: Path) -> str:
    """The whole page, in Markdown; its links to plots are for a page in the folder `beside`."""
    found = {part: read(folder, part.benchmark) for part in PARTS}
    choices = "\n".join(f"- {line}" for line in bandwidth_report.choices(found[PARTS[0]]))
    texts = [HEAD.format(choices=choices, advice=advice(found[PARTS[0]], found[PARTS[1]]))]
    for part, records in found.items():
        if not records:
            texts.append(f"## {part.title}\n\nNo records yet: `python -m benchmarks.{part.benchmark}` makes them.\n")
            continue
        texts += [_links(folder, part.benchmark, beside, part.section(records).strip()) + "\n"]
        texts.append(provenance(records, finished=is_finished(folder, part.benchmark)) + "\n")
    return "\n".join([*texts, LIMITS])


def _links(folder: Path, benchmark: str, beside: Path, text: str) -> str:
    """The section, with its plots behind the heading's paragraph."""
    images = [f"![{path.stem}]({os.path.relpath(path, beside)})" for path in sorted(folder.glob(f"{benchmark}*.png"))]
    heading, _, rest = text.partition("\n\n")
    return "\n\n".join([heading, *images, rest])


def provenance(records: Sequence[Record], *, finished: bool) -> str:
    """With which command, code and machine the records were made, in one paragraph."""
    first = records[0]["environment"]
    commits = {
        f"`{x['environment']['commit'][:10]}`{' with changes' if x['environment']['dirty'] else ''}" for x in records
    }
    loads = [x["environment"]["load_average"] for x in records]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items() if version)
    commands = ", ".join(f"`{command}`" for command in dict.fromkeys(x["command"] for x in records))
    return (
        f"Made by {commands}, {records[0]['time'][:16]} to {records[-1]['time'][:16]} UTC, commit "
        f"{', '.join(sorted(commits))}; {versions}; {first['processor']}, {first['cores']} cores, load average "
        f"{min(loads):.1f} to {max(loads):.1f}."
        + ("" if finished else " The run is not finished: some of what it was to measure is missing.")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=RESULTS, help="default: benchmarks/results")
    args = parser.parse_args()
    folder = args.out.resolve()
    beside = folder.parent if folder == RESULTS else folder
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        if records := read(folder, part.benchmark):
            part.plot(records, folder)
    (beside / "RESULTS.md").write_text(page(folder, beside))
    print(f"Written: {beside / 'RESULTS.md'}")


if __name__ == "__main__":
    main()
