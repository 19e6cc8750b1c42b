"""What the kernels cost: on paper, compiled for GPUs that need not be there; or measured on the GPU at hand.

    python -m benchmarks.kernels --compile
    python -m benchmarks.kernels --gpu

With --out, --compile also adds its numbers to FOLDER/kernels.jsonl, one record a kernel and target.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import compile as compiling, gpu
from benchmarks.records import Record, Records
from benchmarks.tables import Table

NUMBERS = ("registers", "spills", "stack", "shared", "loads", "stores", "fmas", "rounding")
SUMMARY = ("target", "kernels", "most registers", "spills", "most shared memory", "against the rules")


def compile_all(target: str, records: Records | None) -> tuple[Table, list[str]]:
    """Every kernel compiled for `target`; and what is against the rules."""
    columns = ["kernel", "warps", "registers", "shared\nmemory", "loads\nbytes", "stores\nbytes"]
    table = Table(f"Kernels compiled for {target}", [*columns, "bytes an element\n/ fewest"])
    faults = []
    for case in compiling.cases():
        found = compiling.compile_case(case, target)
        faults += [f"{target}: {case.name}: {fault}" for fault in found.faults]
        moved = f"{case.bytes_moved:g} / {case.fewest:g}" if case.bytes_moved is not None else ""
        widths = (", ".join(map(str, x)) for x in (found.loads, found.stores))
        table.rows.append([case.name, str(case.warps), str(found.registers), str(found.shared), *widths, moved])
        if records and not records.has({"kernel": case.name, "target": target}):
            numbers = {name: getattr(found, name) for name in NUMBERS}
            about = {"warps": case.warps, "bytes_moved": case.bytes_moved, "fewest": case.fewest}
            records.add({"kernel": case.name, "target": target}, numbers | about | {"faults": found.faults})
    return table, faults


def section(records: Sequence[Record]) -> str:
    """The part of RESULTS.md about kernels, in Markdown."""
    table = Table("Compiled, not run: what the compiler says of all kernels", SUMMARY)
    for target in dict.fromkeys(record["case"]["target"] for record in records):
        found = [record["measured"] for record in records if record["case"]["target"] == target]
        most = [str(max(x[name] for x in found)) for name in ("registers", "spills", "shared")]
        table.rows.append([target, str(len(found)), *most, str(sum(len(x["faults"]) for x in found))])
    return f"## Kernels\n\n{table.markdown()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--compile", action="store_true", help="compile for every target, and say what was found")
    what.add_argument("--gpu", action="store_true", help="test and measure on this machine's GPU, in ten minutes")
    parser.add_argument(
        "--target", choices=compiling.TARGETS, action="append", help="to compile for; may be repeated (default: all)"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for results (--gpu: build/kernels)")
    parser.add_argument("--quick", action="store_true", help="--gpu with fewer buckets and repetitions")
    args = parser.parse_args()
    if args.gpu:
        gpu.run(args.out or Path("build/kernels"), args.quick)
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    targets = args.target or list(compiling.TARGETS)
    records = Records(args.out, "kernels", {"targets": targets}) if args.out else None
    faults: list[str] = []
    for number, target in enumerate(targets, 1):
        table, found = compile_all(target, records)
        console.print(table.rich())
        console.print(f"[{number}/{len(targets)}] {target}", markup=False)
        faults += found
    if records:
        records.finish()
    if faults:
        sys.exit("\n".join(faults))
    console.print("No spills, no stack, shared memory within limits, wide loads and stores where memory is the bound.")


if __name__ == "__main__":
    main()
