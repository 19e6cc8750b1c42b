"""What one collective takes on the rig: gloo's own, and a hierarchical all-reduce, at several sizes.

Used by benchmarks.model, which fits its cost model to the numbers. As a script it is one rank, started by the rig;
rank 0 writes JSON lines to --out, one a case: {"collective", "nbytes", "seconds": of each repetition}.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import run_rank
from benchmarks.rig import Rig
from commhooks.executor import all_gather_single

SIZES = (1_000, 4_000, 16_000, 64_000, 250_000, 1_000_000, 4_000_000, 8_000_000)  # bytes of one rank's tensor
QUICK_SIZES = (1_000, 16_000, 250_000, 1_000_000)
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "broadcast")
HIERARCHICAL = "hierarchical all_reduce"
PATIENCE = 0.4  # seconds for the repetitions of one case
LEAST, MOST = 2, 30  # repetitions
TIMEOUT = 300  # seconds for one launch

Record = dict[str, Any]


def measure(
    rig: Rig, collectives: tuple[str, ...], sizes: tuple[int, ...], on_tick: Callable[[], None]
) -> list[Record]:
    """Every collective at every size on the rig: {"collective", "nbytes", "seconds"} each.

    Raises:
        RigError: a rank failed or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.jsonl")
        command = [sys.executable, "-m", "benchmarks.collectives", f"--out={out}"]
        command += ["--collectives", *collectives, "--sizes", *map(str, sizes)]
        rig.run(command, timeout=TIMEOUT, on_tick=on_tick)
        return [json.loads(line) for line in out.read_text().splitlines()]


class Ranks:
    """The groups of this process, and the collectives among them."""

    def __init__(self) -> None:
        self.world_size, rank = dist.get_world_size(), dist.get_rank()
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = [list(range(first, first + local)) for first in range(0, self.world_size, local)]
        groups = [dist.new_group(ranks) for ranks in nodes]
        self.node, self.leader = groups[rank // local], rank // local * local
        self.leaders = dist.new_group([ranks[0] for ranks in nodes])
        self.is_leader = rank == self.leader

    def run(self, collective: str, x: Tensor, received: Tensor) -> None:
        """To its end. `received` has world_size times the elements of x."""
        match collective:
            case "all_reduce":
                dist.all_reduce(x)
            case "all_gather":
                all_gather_single(received, x)
            case "all_to_all":
                dist.all_to_all_single(received[: x.numel()], x)
            case "broadcast":
                dist.broadcast(x, 0)
            case _:
                dist.reduce(x, self.leader, group=self.node)
                if self.is_leader:
                    dist.all_reduce(x, group=self.leaders)
                dist.broadcast(x, self.leader, group=self.node)

    def time(self, collective: str, nbytes: int) -> list[float]:
        """Seconds until the last rank is done, of each repetition."""
        x = torch.zeros(nbytes // 4 // self.world_size * self.world_size)
        received = x.new_empty(x.numel() * self.world_size)
        first = self._once(collective, x, received)
        more = min(max(LEAST, round(PATIENCE / first)), MOST)
        return [self._once(collective, x, received) for _ in range(more)]

    def _once(self, collective: str, x: Tensor, received: Tensor) -> float:
        dist.barrier()
        start = time.perf_counter()
        self.run(collective, x, received)
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()


def time_all(collectives: list[str], sizes: list[int], out: Path) -> None:
    """Time all collectives at all sizes (bytes); rank 0 writes them, one JSON line each."""
    ranks = Ranks()
    lines = []
    for nbytes in sizes:
        for collective in collectives:
            seconds = ranks.time(collective, nbytes)
            lines.append(json.dumps({"collective": collective, "nbytes": nbytes, "seconds": seconds}))
    if dist.get_rank() == 0:
        out.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collectives", nargs="+", choices=(*COLLECTIVES, HIERARCHICAL), required=True)
    parser.add_argument("--sizes", nargs="+", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    run_rank(partial(time_all, args.collectives, args.sizes, args.out))


if __name__ == "__main__":
    main()
