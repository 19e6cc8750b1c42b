"""One rank of benchmarks.convergence: trains what the plan says, one run after the other, in one launch of processes.

Started by the rig. --plan is a file of JSON lines, one job each; rank 0 appends one JSON line to --out for each that is
done, {"index": line of the plan, "result": ...}, so what is finished stays if a later one is not.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import commhooks
from benchmarks.ranks import run_rank
from benchmarks.tasks import TASKS, Task, evaluate, loss_of
from commhooks.comm import AllReduce

WARM_UP = 4  # steps before timing
TURN = 3  # timed steps of a variant before the next one has its turn; one more, not timed, comes first
NO_COMMUNICATION = "no communication"

Result = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """A hook with its options.

    Args:
        label: for tables.
        hook, state: what is registered; None is plain DDP.
        bucket_cap_mb: DDP's.
        only: the one task that it is for; None is all.
        momentum_in_hook: the hook has SGD's momentum, the optimizer none.
        control: without error feedback, to show what that does.
        timed_as: the variant whose step takes as long: only that one is timed.
    """

    label: str
    hook: Callable[..., Any] | None = None
    state: Callable[[], commhooks.HookState] | None = None
    bucket_cap_mb: float = 5
    only: str | None = None
    momentum_in_hook: bool = False
    control: bool = False
    timed_as: str | None = None


def _powersgd(label: str, rank: int, *, alternating: bool = False, **fields: Any) -> Variant:
    def state() -> commhooks.HookState:
        return commhooks.PowerSGDState(
            matrix_approximation_rank=rank,
            start_powerSGD_iter=0,
            use_error_feedback=not fields.get("control"),
            compression_stats_logging_frequency=0,
            wire_dtype=torch.bfloat16,
            alternating=alternating,
        )

    return Variant(label, commhooks.powersgd_hook, state, **fields)


def _topk(label: str, density: float, *, warmup_steps: int = 0, momentum: float = 0, **fields: Any) -> Variant:
    def state() -> commhooks.HookState:
        return commhooks.TopKState(
            density=density,
            warmup_steps=warmup_steps,
            momentum=momentum,
            use_error_feedback=not fields.get("control"),
        )

    return Variant(label, commhooks.topk_hook, state, momentum_in_hook=momentum > 0, **fields)


VARIANTS = {
    "plain": Variant("plain DDP", bucket_cap_mb=1),
    "bf16": Variant("bf16", commhooks.bf16_hook, commhooks.CastState, bucket_cap_mb=1),
    "powersgd-1": _powersgd("PowerSGD rank 1", 1, only="digits"),
    "powersgd-4": _powersgd("PowerSGD rank 4", 4),
    "powersgd-8": _powersgd("PowerSGD rank 8", 8),
    "powersgd-16": _powersgd("PowerSGD rank 16", 16),
    "alternating-4": _powersgd("PowerSGD rank 4, alternating", 4, alternating=True),
    "alternating-8": _powersgd("PowerSGD rank 8, alternating", 8, alternating=True),
    "topk-1": _topk("top-k 1 %", 0.01),
    "topk-1-warmup": _topk("top-k to 1 % in 100 steps", 0.01, warmup_steps=100, timed_as="topk-1"),
    "topk-5": _topk("top-k 5 %", 0.05, only="digits"),
    "topk-1-momentum": _topk("top-k 1 %, momentum in the hook", 0.01, momentum=0.9, only="digits"),
    "randomk-5": Variant(
        "random-k 5 %", commhooks.randomk_hook, lambda: commhooks.RandomKState(density=0.05), only="digits"
    ),
    "powersgd-1-control": _powersgd(
        "PowerSGD rank 1, no feedback", 1, control=True, timed_as="powersgd-1", only="digits"
    ),
    "powersgd-4-control": _powersgd("PowerSGD rank 4, no feedback", 4, control=True, timed_as="powersgd-4"),
    "topk-1-control": _topk("top-k 1 %, no feedback", 0.01, control=True, timed_as="topk-1"),
}


class Training:
    """A task's model under DDP with one hook, and its optimizer, on this rank."""

    def __init__(self, task: Task, variant: Variant, seed: int, lr: float) -> None:
        self.problem = task.make(seed, dist.get_rank(), dist.get_world_size())
        self.ddp = DDP(self.problem.model, bucket_cap_mb=variant.bucket_cap_mb, gradient_as_bucket_view=True)
        self.state = variant.state and variant.state()
        if variant.hook:
            commhooks.register(self.ddp, variant.hook, self.state)
        parameters = self.ddp.parameters()
        self.optimizer: torch.optim.Optimizer
        if task.momentum is None:
            self.optimizer = torch.optim.AdamW(parameters, lr=lr, fused=True)
        else:
            momentum = 0.0 if variant.momentum_in_hook else task.momentum
            self.optimizer = torch.optim.SGD(parameters, lr=lr, momentum=momentum)
        self.steps, self.seconds = 0, 0.0

    def step(self, *, communicate: bool = True) -> float:
        """The seconds of one step."""
        x, y = next(self.problem.batches)
        start = time.perf_counter()
        with nullcontext() if communicate else self.ddp.no_sync():
            loss_of(self.ddp, x, y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - start
        self.steps += 1
        self.seconds += seconds
        return seconds

    def bytes_sent(self) -> float:
        """So far, by this rank."""
        if self.state is not None:
            return self.state.metrics()["bytes_sent"]
        sizes = [AllReduce(x).bytes_sent(dist.get_world_size()) for x in self.ddp.parameters()]
        return self.steps * sum(sizes)


def train(task: str, variant: str, seed: int, lr: float, steps: int) -> Result:
    """One run. Of every evaluation: steps done, held-out loss and accuracy, bytes sent, seconds spent in steps."""
    training = Training(TASKS[task], VARIANTS[variant], seed, lr)
    curve: dict[str, list[float]] = {name: [] for name in ("step", "loss", "accuracy", "bytes", "seconds")}
    for step in range(steps + 1):
        if step:
            training.step()
        if step % TASKS[task].evaluate_every == 0 or step == steps:
            total = evaluate(training.problem)
            dist.all_reduce(total)
            loss, right, number = total.tolist()
            point = (step, loss / number, right / number, training.bytes_sent(), training.seconds)
            for name, value in zip(curve, point, strict=True):
                curve[name].append(value)
    return curve


def time_steps(task: str, variants: list[str], rounds: int) -> Result:
    """The seconds of each variant's steps, and of steps without communication: the variants in turn, `rounds` times."""
    trainings = {name: Training(TASKS[task], VARIANTS[name], seed=0, lr=1e-4) for name in variants}
    trainings[NO_COMMUNICATION] = Training(TASKS[task], VARIANTS["plain"], seed=0, lr=1e-4)
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for turn in range(rounds + 1):
        for name, training in trainings.items():
            dist.barrier()
            communicate = name != NO_COMMUNICATION
            past = [training.step(communicate=communicate) for _ in range(TURN + 1 if turn else WARM_UP)]
            if turn:
                seconds[name] += past[1:]
    return seconds


def do(plan: Path, out: Path) -> None:
    """All jobs of the plan."""
    jobs: dict[str, Callable[..., Result]] = {"train": train, "time": time_steps}
    for index, line in enumerate(plan.read_text().splitlines()):
        job = json.loads(line)
        result = jobs[job.pop("do")](**job)
        if dist.get_rank() == 0:
            with out.open("a") as file:
                file.write(json.dumps({"index": index, "result": result}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    run_rank(partial(do, args.plan, args.out))


if __name__ == "__main__":
    main()
