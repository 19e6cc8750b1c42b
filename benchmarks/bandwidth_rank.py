"""One rank of the bandwidth benchmark. Started by the rig, once for each rank; rank 0 writes JSON lines to --out.

All variants live in this one process group, each with a model of its own, and are measured in turn: A B C A B C. What
disturbs the machine for a while disturbs all alike. Lines: {"at"} before a variant's turn, {"refused", "why"} for a
hook that torch does not allow here, and one a slot: {"variant", "round", "steps", "step_ms", "tx_bytes_per_step",
"metric_bytes_per_step", "phases_ms"}.
"""

import argparse
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.ranks import run_rank
from benchmarks.rig import tx_bytes
from benchmarks.train import Training
from benchmarks.variants import VARIANTS

NO_SYNC = "no_sync"  # the control: the same step without communication
PHASES = ("compress", "launch", "wait", "decompress")
RANGE = re.compile(rf"commhooks\.\w+\.({'|'.join(PHASES)}) bucket \d+")
WARM_UP = (3, 5)  # steps: DDP rebuilds its buckets in the first, torch's PowerSGD begins in the third
LEAST_STEPS = 2  # a slot
PROFILED_STEPS = 2  # a slot, or fewer where they are slow
BATCH, LR, RANK = 4, 1e-3, 4


@dataclass
class Slot:
    """Some steps between two barriers: the slowest rank's median, and the bytes that the busiest node sent."""

    step_ms: float
    tx_bytes_per_step: float


def measure_slot(step: Callable[[], object], steps: int, interface: str) -> Slot:
    """Time `steps` steps, and count what leaves the interface meanwhile. All ranks call it together."""
    dist.barrier()
    before = tx_bytes(interface)
    seconds = [_timed(step) for _ in range(steps)]
    dist.barrier()
    sent = (tx_bytes(interface) - before) / steps
    worst = torch.tensor([median(seconds) * 1e3, sent], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return Slot(*worst.tolist())


def _timed(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


class Contender:
    """One variant in the race, with its model."""

    def __init__(self, name: str) -> None:
        self.name = name
        variant = VARIANTS["plain" if name == NO_SYNC else name]
        self.training = Training(variant, RANK, BATCH, LR)
        self.step: Callable[[], object] = partial(self.training.step, communicate=name != NO_SYNC)
        self.steps = LEAST_STEPS  # a slot

    def warm_up(self, slot_seconds: float) -> None:
        """The first steps, which take longer than others; then rank 0 says how many make a slot."""
        least, most = WARM_UP
        seconds = [_timed(self.step) for _ in range(least)]
        while len(seconds) < _agreed(most if sum(seconds) < slot_seconds else least):
            seconds.append(_timed(self.step))
        self.steps = _agreed(max(LEAST_STEPS, round(slot_seconds / median(seconds[1:]))))

    def slot(self, interface: str) -> dict[str, object]:
        sent = self.training.metric_bytes()
        slot = measure_slot(self.step, self.steps, interface)
        counted = None if sent is None else ((self.training.metric_bytes() or 0) - sent) / self.steps
        return {
            "steps": self.steps,
            "step_ms": slot.step_ms,
            "tx_bytes_per_step": slot.tx_bytes_per_step,
            "metric_bytes_per_step": counted,
            "phases_ms": self._phases(),
        }

    def _phases(self) -> dict[str, float] | None:
        """Milliseconds a step that this rank spends in each part of a hook of ours, in steps of their own."""
        if self.training.state is None:
            return None
        steps = min(PROFILED_STEPS, self.steps // 2)
        watched = profile(activities=[ProfilerActivity.CPU]) if dist.get_rank() == 0 else nullcontext()
        with watched as profiler:
            for _ in range(steps):
                self.step()
        return phases_ms(profiler.events() or [], steps) if profiler else None


def phases_ms(events: Any, steps: int) -> dict[str, float] | None:
    """Milliseconds a step in each phase, of the ranges that the executor marks. None where it marked none."""
    found: dict[str, float] = defaultdict(float)
    for event in events:
        if match := RANGE.fullmatch(event.name):
            found[match[1]] += event.time_range.elapsed_us() * 1e-3 / steps
    return {phase: found[phase] for phase in PHASES} if found else None


def _agreed(number: int) -> int:
    """Rank 0's number: all ranks must do as many steps."""
    answer = torch.tensor(number)
    dist.broadcast(answer, 0)
    return int(answer)


def race(names: list[str], rounds: int, slot_seconds: float, out: Path) -> None:
    """All rounds of all variants; the lines that rank 0 writes to `out` are described above."""
    with out.open("w") if dist.get_rank() == 0 else nullcontext() as file:
        _race(names, rounds, slot_seconds, partial(_write, file))


def _race(names: list[str], rounds: int, slot_seconds: float, write: Callable[..., None]) -> None:
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    contenders = []
    for name in names:
        write(at=name)
        try:
            contenders.append(Contender(name))
        except (RuntimeError, TypeError, ValueError) as error:
            write(refused=name, why=str(error).strip().partition("\n")[0])
    for contender in contenders:
        write(at=contender.name)
        contender.warm_up(slot_seconds)
    for number in range(rounds):
        for contender in contenders:
            write(at=contender.name)
            write(variant=contender.name, round=number, **contender.slot(interface))


def _write(out: TextIO | None, **line: object) -> None:
    if out:
        out.write(json.dumps(line) + "\n")
        out.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=[NO_SYNC, *VARIANTS], required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slot-seconds", type=float, default=1.5)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    run_rank(partial(race, args.variants, args.rounds, args.slot_seconds, args.out), timeout=120)


if __name__ == "__main__":
    main()
