"""Whole hooks in real DDP steps on one GPU, against the same steps without communication; and whether the host waits.

As a script, one of several ranks that share the GPU, with gloo; rank 0 prints JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel as DDP

import commhooks
from benchmarks.gpu_cases import grad_bucket, powersgd_state, topk_state, torch_powersgd_state
from benchmarks.gpu_shapes import BucketShapes
from benchmarks.gpu_timing import GpuTimer

WIDTH, DEPTH, BATCH = 2048, 4, 512
BUCKET_CAP_MB = 20  # a layer has 16 MiB
WARM_UP, STEPS = 6, 15
TIMEOUT = timedelta(seconds=60)  # of a collective
TWO_RANKS_TIMEOUT = 120  # seconds, for both processes from start to end
AHEAD = 300  # copies queued before the hook: tens of milliseconds of work, some ten times what a hook's host part takes

Register = Callable[[DDP], object]
Row = dict[str, Any]

OURS: dict[str, Register] = {
    "DDP without a hook": lambda _: None,
    "bf16_hook": lambda ddp: commhooks.register(ddp, commhooks.bf16_hook),
    "powersgd_hook": lambda ddp: commhooks.register(ddp, commhooks.powersgd_hook, powersgd_state()),
    "topk_hook": lambda ddp: commhooks.register(ddp, commhooks.topk_hook, topk_state()),
}
# On gloo DDP refuses the one, and the other hangs with several buckets.
TORCHS: dict[str, Register] = {
    "torch bf16_compress_hook": lambda ddp: ddp.register_comm_hook(None, default_hooks.bf16_compress_hook),
    "torch powerSGD_hook": lambda ddp: ddp.register_comm_hook(torch_powersgd_state(), torch_powersgd.powerSGD_hook),
}


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # nothing leaves the machine, which may have no other interface
    with tempfile.TemporaryDirectory() as folder:
        init("nccl", Path(folder, "store"), 0, 1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def init(backend: str, store: Path, rank: int, world_size: int) -> None:
    method = f"file://{store}"
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=world_size, timeout=TIMEOUT)


def step_times(hooks: dict[str, Register], device: torch.device) -> list[Row]:
    """Milliseconds of a forward and backward pass with each hook, and in turn with them under `no_sync`."""
    rows: list[Row] = []
    for name, register in hooks.items():
        torch.manual_seed(0)
        layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        ddp = DDP(nn.Sequential(*layers).to(device), bucket_cap_mb=BUCKET_CAP_MB)
        register(ddp)
        x = torch.randn(BATCH, WIDTH, device=device)
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(WARM_UP + STEPS):
            for communicate, past in times.items():
                past.append(_step_seconds(ddp, x, communicate=communicate) * 1e3)
        step, alone = (median(past[WARM_UP:]) for past in times.values())
        rows.append({"hook": name, "step_ms": step, "no_sync_ms": alone, "added_ms": step - alone})
    return rows


def _step_seconds(ddp: DDP, x: torch.Tensor, *, communicate: bool) -> float:
    ddp.zero_grad()
    torch.cuda.synchronize(x.device)
    start = time.perf_counter()
    with nullcontext() if communicate else ddp.no_sync():
        ddp(x).square().mean().backward()
    torch.cuda.synchronize(x.device)
    return time.perf_counter() - start


def host_waits(shapes: BucketShapes, timer: GpuTimer) -> list[Row]:
    """Whether the host waits for the GPU in a hook call, in two ways.

    torch's own check raises at operations it knows to wait. And while the GPU is busy with what was queued before the
    call, the call must return; this sees every way of waiting. torch's PowerSGD, which waits, shows that it does.
    """
    group = dist.group.WORLD
    hooks: list[tuple[Callable[..., Any], Any]] = [
        (commhooks.bf16_hook, commhooks.CastState(group, use_error_feedback=True)),
        (commhooks.powersgd_hook, powersgd_state(process_group=group)),
        (commhooks.powersgd_hook, powersgd_state(process_group=group, alternating=True)),
        (commhooks.topk_hook, topk_state(process_group=group)),
        (torch_powersgd.powerSGD_hook, torch_powersgd_state()),
    ]
    rows: list[Row] = []
    for hook, state in hooks:
        bucket = grad_bucket(shapes, timer.device)
        for _ in range(WARM_UP):
            hook(state, bucket).wait()
        timer.synchronize()
        name = f"{hook.__module__.partition('.')[0]} {hook.__name__}"
        name += ", alternating" if getattr(state, "alternating", False) else ""
        rows.append({"hook": name, "waits": _why_it_waits(lambda: hook(state, bucket), timer)})  # noqa: B023 - called here
    return rows


def _why_it_waits(call: Callable[[], object], timer: GpuTimer) -> str | None:
    timer.flush(AHEAD)
    queued = torch.cuda.Event()
    queued.record()
    with warnings.catch_warnings():  # it knows not all that waits, it says
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
        returned_early = not queued.query()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        timer.synchronize()
    return None if returned_early else "the call returned only after the GPU had done all that was queued before it"


def two_ranks() -> list[Row]:
    """`step_times` of two processes that share the GPU: each also waits for the other's work on it.

    Raises:
        RuntimeError: a process failed, or both together took too long; with what they wrote.
    """
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.gpu_hooks", f"--store={folder}/store"]
        logs = [Path(folder, f"rank{rank}.log") for rank in range(2)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                with log.open("wb") as file:
                    processes.append(
                        subprocess.Popen([*command, f"--rank={rank}"], stdout=file, stderr=file, env=environment)
                    )
            deadline = time.monotonic() + TWO_RANKS_TIMEOUT
            codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            codes = [-1]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            raise RuntimeError("two ranks on one GPU failed:\n" + "\n".join(log.read_text()[-2000:] for log in logs))
        rows: list[Row] = json.loads(logs[0].read_text().splitlines()[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True, help="a file that both ranks meet at")
    args = parser.parse_args()
    init("gloo", args.store, args.rank, 2)
    try:
        rows = step_times(OURS, torch.device("cuda", 0))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
