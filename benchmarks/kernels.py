"""What the kernels cost: on paper, compiled for GPUs that need not be there; or measured on the GPU at hand.

python -m benchmarks.kernels --compile
python -m benchmarks.kernels --gpu
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import compile as compiling, gpu


def compile_table(target: str) -> tuple[Table, list[str]]:
    """Every kernel compiled for `target`; and what is against the rules."""
    table = Table(title=f"Kernels compiled for {target}")
    table.add_column("kernel")
    for column in (
        "warps",
        "registers",
        "shared\nmemory",
        "loads\nbytes",
        "stores\nbytes",
        "bytes an element\n/ fewest",
    ):
        table.add_column(column, justify="right")
    faults = []
    for case in compiling.cases():
        found = compiling.compile_case(case, target)
        faults += [f"{target}: {case.name}: {fault}" for fault in found.faults]
        moved = f"{case.bytes_moved:g} / {case.fewest:g}" if case.bytes_moved is not None else ""
        widths = (", ".join(map(str, x)) for x in (found.loads, found.stores))
        table.add_row(case.name, str(case.warps), str(found.registers), str(found.shared), *widths, moved)
    return table, faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--compile", action="store_true", help="compile for every target, and say what was found")
    what.add_argument("--gpu", action="store_true", help="test and measure on this machine's GPU, in ten minutes")
    parser.add_argument(
        "--target", choices=compiling.TARGETS, action="append", help="to compile for; may be repeated (default: all)"
    )
    parser.add_argument("--out", type=Path, default=Path("build/kernels"), help="folder for results of --gpu")
    parser.add_argument("--quick", action="store_true", help="--gpu with fewer buckets and repetitions")
    args = parser.parse_args()
    if args.gpu:
        gpu.run(args.out, args.quick)
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    faults: list[str] = []
    for target in args.target or compiling.TARGETS:
        table, found = compile_table(target)
        console.print(table)
        faults += found
    if faults:
        sys.exit("\n".join(faults))
    console.print("No spills, no stack, shared memory within limits, wide loads and stores where memory is the bound.")


if __name__ == "__main__":
    main()
