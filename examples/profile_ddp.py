"""Where the time of a step goes with a hook: data, compute, communication that backward does not hide, and overhead.

    torchrun --nproc-per-node 2 examples/profile_ddp.py

Writes rank 0's trace (open it in https://ui.perfetto.dev) and prints a table made from it. The hook's own ranges are
named `commhooks.{algorithm}.{phase} bucket {i}`. They show the host's time; on a GPU look at the streams.
"""

import argparse
import json
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import commhooks

HOOKS = {
    "allreduce": (commhooks.allreduce_hook, commhooks.HookState, {}),
    "bf16": (commhooks.bf16_hook, commhooks.CastState, {}),
    "powersgd": (
        commhooks.powersgd_hook,
        commhooks.PowerSGDState,
        {"matrix_approximation_rank": 4, "start_powerSGD_iter": 0, "wire_dtype": torch.bfloat16},
    ),
    "topk": (commhooks.topk_hook, commhooks.TopKState, {}),
}


def load_batch(width: int) -> Tensor:
    time.sleep(0.002)  # stands for a disk
    return torch.randn(64, width)


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, width: int, steps: int) -> None:
    for _ in range(steps):
        with record_function("data"):
            x = load_batch(width)
        with record_function("forward"):
            loss = (ddp(x) - x).square().mean()
        with record_function("backward"):  # and in it, the hook
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()


def milliseconds_a_step(trace: Path, steps: int) -> dict[str, float]:
    """The ranges of a trace, summed by name; those of the hook by phase, whatever the bucket."""
    total: dict[str, float] = defaultdict(float)
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("cat") == "user_annotation":
            name = event["name"]
            if name.startswith("commhooks."):
                name = name.split(" bucket ")[0].rsplit(".", 1)[1]
            total[name] += event["dur"] / 1e3 / steps
    return total


def table(ms: dict[str, float]) -> str:
    hook = {phase: ms[phase] for phase in ("compress", "launch", "wait", "decompress")}
    rows = {
        "data": ms["data"],
        "compute": ms["forward"] + ms["backward"] + ms["optimizer"] - sum(hook.values()),
        "exposed communication": hook["wait"],
        "overhead": sum(hook.values()) - hook["wait"],
    }
    step = sum(rows.values())
    lines = [f"{name:22}{value:8.1f} ms {value / step:6.0%}" for name, value in rows.items()]
    lines += [f"  {phase:20}{value:8.1f} ms" for phase, value in hook.items() if phase != "wait"]
    return "\n".join([*lines, f"{'step':22}{step:8.1f} ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", choices=HOOKS, default="powersgd", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="that are profiled (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="of the model's layers (default: %(default)s)")
    parser.add_argument("--bucket-cap-mb", type=float, default=2, help="DDP's bucket size (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/profile"), help="folder (default: %(default)s)")
    args = parser.parse_args()

    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    torch.manual_seed(0)
    layers = (layer for _ in range(6) for layer in (nn.Linear(args.width, args.width), nn.GELU()))
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=args.bucket_cap_mb)
    hook, state_type, options = HOOKS[args.hook]
    commhooks.register(ddp, hook, state_type(**options))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    train(ddp, optimizer, args.width, steps=3)  # DDP lays out its buckets anew, memory is allocated
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train(ddp, optimizer, args.width, args.steps)

    if dist.get_rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        trace = args.out / f"{args.hook}.json"
        profiler.export_chrome_trace(str(trace))
        print(table(milliseconds_a_step(trace, args.steps)))
        print(f"trace: {trace}")
    last = dist.barrier(async_op=True)  # kept until the end: see train_ddp.py
    last.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
