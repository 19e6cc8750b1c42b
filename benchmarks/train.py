"""One rank of the main job under measurement: trains the example's GPT with one hook and writes down what it saw.

Started by the rig, once for each rank. Rank 0 writes JSON lines to --out: one a step {step, seconds, loss}, and last
one with the results. `seconds` is time spent in training steps alone.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import mean, median
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel as DDP

import commhooks
from benchmarks.rig import tx_bytes
from examples.train_ddp import GPT, batches, loss_of, standard_library_text

WARM_UP = 5  # steps before timing: bucket rebuild, memory, first touches
NO_COMMUNICATION_STEPS = 25
HELD_OUT = 200_000  # bytes at the text's end, for evaluation


@dataclass(frozen=True)
class Variant:
    """A hook with its options. `register` gives its state back where that counts bytes."""

    label: str
    register: Callable[[DDP, int], commhooks.HookState | None]
    bucket_cap_mb: float = 1


def _ours(hook: Callable[..., Any], **options: Any) -> Callable[[DDP, int], commhooks.HookState | None]:
    def register(ddp: DDP, _: int) -> commhooks.HookState:
        return commhooks.register(ddp, hook, commhooks.CastState(**options))

    return register


def _powersgd(**options: Any) -> Callable[[DDP, int], commhooks.HookState | None]:
    def register(ddp: DDP, rank: int) -> commhooks.HookState:
        state = commhooks.PowerSGDState(matrix_approximation_rank=rank, start_powerSGD_iter=0, **options)
        return commhooks.register(ddp, commhooks.powersgd_hook, state)

    return register


def _topk(**options: Any) -> Callable[[DDP, int], commhooks.HookState | None]:
    def register(ddp: DDP, _: int) -> commhooks.HookState:
        return commhooks.register(ddp, commhooks.topk_hook, commhooks.TopKState(**options))

    return register


def _torch_fp16(ddp: DDP, _: int) -> None:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _torch_powersgd(ddp: DDP, rank: int) -> None:
    state = torch_powersgd.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, torch_powersgd.powerSGD_hook)


VARIANTS = {
    "plain": Variant("plain DDP", lambda *_: None),
    "bf16": Variant("bf16_hook", _ours(commhooks.bf16_hook)),
    "powersgd": Variant("powersgd_hook, bf16 wire", _powersgd(wire_dtype=torch.bfloat16), bucket_cap_mb=5),
    "powersgd-alternating": Variant(
        "powersgd_hook, alternating, bf16 wire", _powersgd(wire_dtype=torch.bfloat16, alternating=True), bucket_cap_mb=5
    ),
    "topk": Variant("topk_hook, 1 %", _topk(), bucket_cap_mb=5),
    "topk-warmup": Variant("topk_hook, to 1 % in 150 steps", _topk(warmup_steps=150), bucket_cap_mb=5),
    "topk-leader": Variant("topk_hook, 1 %, leader", _topk(aggregation="leader"), bucket_cap_mb=5),
    "topk-balanced": Variant("topk_hook, 1 %, balanced", _topk(aggregation="balanced"), bucket_cap_mb=5),
    "torch-fp16": Variant("torch fp16_compress_hook", _torch_fp16),
    "torch-powersgd": Variant("torch powerSGD_hook, one bucket", _torch_powersgd, bucket_cap_mb=100),
}


class Training:
    """The model, its optimizer and its data on this rank; and the clock of its steps."""

    def __init__(self, variant: Variant, rank: int, batch: int, lr: float) -> None:
        torch.manual_seed(0)
        self.model = GPT()
        self.ddp = DDP(self.model, bucket_cap_mb=variant.bucket_cap_mb, gradient_as_bucket_view=True)
        self.state = variant.register(self.ddp, rank)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=lr)
        text = standard_library_text()
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

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    training = Training(VARIANTS[args.variant], args.rank, args.batch, args.lr)
    with args.out.open("w") if dist.get_rank() == 0 else nullcontext() as out:
        results = run(training, args.steps, args.seconds, os.environ["GLOO_SOCKET_IFNAME"], out)
        if out:
            out.write(json.dumps(results) + "\n")
    last = dist.barrier(async_op=True)  # kept until the end, as in the example
    last.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
