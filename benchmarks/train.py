"""One rank of the main job under measurement: trains the example's GPT with one hook and writes down what it saw.

Started by the rig, once for each rank. Rank 0 writes JSON lines to --out: one a step {step, seconds, loss}, and last
one with the results. `seconds` is time spent in training steps alone.
"""

import argparse
import json
import os
import time
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from statistics import mean, median
from typing import TextIO

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from benchmarks.ranks import run_rank
from benchmarks.rig import tx_bytes
from benchmarks.variants import VARIANTS, Variant
from examples.train_ddp import GPT, batches, loss_of, standard_library_text

WARM_UP = 5  # steps before timing: bucket rebuild, memory, first touches
NO_COMMUNICATION_STEPS = 25
HELD_OUT = 200_000  # bytes at the text's end, for evaluation


class Training:
    """The model, its optimizer and its data on this rank; and the clock of its steps."""

    def __init__(self, variant: Variant, rank: int, batch: int, lr: float) -> None:
        torch.manual_seed(0)
        self.model = GPT()
        # Every rank has drawn the same parameters: DDP need not send them over a slow link first.
        self.ddp = DDP(self.model, bucket_cap_mb=variant.bucket_cap_mb, gradient_as_bucket_view=True, init_sync=False)
        self.state = variant.register(self.ddp, rank)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=lr, fused=True)
        text = _text()
        self.data = batches(text[:-HELD_OUT], batch, self.model.context, seed=1 + dist.get_rank())
        held_out = batches(text[-HELD_OUT:], 64, self.model.context, seed=0)
        self.held_out = [next(held_out) for _ in range(2)]
        self.seconds: list[float] = []

    def step(self, *, communicate: bool = True) -> float:
        x, y = next(self.data)
        start = time.perf_counter()
        with nullcontext() if communicate else self.ddp.no_sync():
            loss = loss_of(self.ddp, x, y)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        return loss.item()

    @torch.no_grad()
    def evaluate(self) -> float:
        """The loss on text that is not trained on. All ranks have the same parameters, so each computes the same."""
        self.model.eval()
        losses = [loss_of(self.model, x, y) for x, y in self.held_out]
        self.model.train()
        dist.barrier()
        return torch.stack(losses).mean().item()

    def metric_bytes(self) -> float | None:
        return self.state.metrics()["bytes_sent"] if self.state else None


@cache
def _text() -> torch.Tensor:
    return standard_library_text()


def run(training: Training, steps: int, seconds: float, interface: str, out: TextIO | None) -> dict[str, object]:
    """Train for `steps` steps, then on until `seconds` have passed in steps; then some steps without communication."""
    results: dict[str, object] = {}
    counted_bytes = metric_bytes = 0.0
    total = steps
    for step in range(1, steps * 1000):
        if step == WARM_UP + 1:
            dist.barrier()
            start_bytes, start_metric = tx_bytes(interface), training.metric_bytes()
        loss = training.step()
        if out:
            out.write(json.dumps({"step": step, "seconds": sum(training.seconds), "loss": loss}) + "\n")
            out.flush()
        if step == steps:
            dist.barrier()
            per_step = 1 / (steps - WARM_UP)
            counted_bytes = (tx_bytes(interface) - start_bytes) * per_step
            if start_metric is not None:
                metric_bytes = ((training.metric_bytes() or 0) - start_metric) * per_step
            results["loss"] = training.evaluate()
        if step >= total:
            total = _steps_in(seconds, training.seconds)
            if step >= total:
                break
    results["steps_in_same_time"] = step
    results["loss_same_time"] = training.evaluate()
    results["step_ms"] = median(training.seconds[WARM_UP:]) * 1e3
    results["tx_bytes_per_step"] = counted_bytes
    results["metric_bytes_per_step"] = metric_bytes or None
    training.seconds.clear()
    for _ in range(NO_COMMUNICATION_STEPS):
        training.step(communicate=False)
    results["no_communication_ms"] = median(training.seconds[WARM_UP:]) * 1e3
    return results


def _steps_in(seconds: float, past: list[float]) -> int:
    """How many steps fit into `seconds`, at the pace so far: rank 0's answer, for ranks must do the same number."""
    more = (seconds - sum(past)) / mean(past[WARM_UP:])
    answer = torch.tensor(len(past) + max(0, round(more)))
    dist.broadcast(answer, 0)
    return int(answer)


def train(args: argparse.Namespace) -> None:
    training = Training(VARIANTS[args.variant], args.rank, args.batch, args.lr)
    with args.out.open("w") if dist.get_rank() == 0 else nullcontext() as out:
        results = run(training, args.steps, args.seconds, os.environ["GLOO_SOCKET_IFNAME"], out)
        if out:
            out.write(json.dumps(results) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.steps <= WARM_UP:
        parser.error(f"--steps is {args.steps}; it must be more than the {WARM_UP} steps of warm-up")

    run_rank(partial(train, args))


if __name__ == "__main__":
    main()
