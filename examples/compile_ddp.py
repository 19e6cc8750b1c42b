"""torch.compile with a commhooks hook: both ways, and what a step costs with each.

    torchrun --nproc-per-node 2 examples/compile_ddp.py
    torchrun --nproc-per-node 2 examples/compile_ddp.py --backend aot_eager    # where there is no C++ compiler

The hook is registered on the DistributedDataParallel model, before or after it is compiled. It runs in backward as
ever: it is not compiled itself. `torch.compile(ddp)` splits the graph where DDP's buckets end, so that hooks still
overlap with backward. `DDP(torch.compile(model))` compiles backward as one piece, and all hooks run after it.
"""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor", help="torch.compile's (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="measured steps (default: %(default)s)")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(minutes=5))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)

    for way in ("not compiled", "torch.compile(ddp)", "DDP(torch.compile(model))"):
        model = network().to(device)
        if way == "DDP(torch.compile(model))":
            model = torch.compile(model, backend=args.backend)
        ddp = DistributedDataParallel(model, bucket_cap_mb=1)  # torch.compile(ddp) takes no less
        state = commhooks.PowerSGDState(matrix_approximation_rank=4, start_powerSGD_iter=0)
        commhooks.register(ddp, commhooks.powersgd_hook, state)
        called = torch.compile(ddp, backend=args.backend) if way == "torch.compile(ddp)" else ddp

        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for step in range(2 + args.steps):
            if step == 2:  # DDP has laid out its buckets and all is compiled
                start = time.perf_counter()
            loss = called(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        step_ms = (time.perf_counter() - start) / args.steps * 1e3
        commhooks.check_replicas(ddp)
        if dist.get_rank() == 0:
            ratio = state.metrics()["ratio"]
            print(f"{way:26}   loss {loss.item():.6f}   {step_ms:6.1f} ms/step   ratio {ratio:.1f}")

    last = dist.barrier(async_op=True)  # kept until the end: see train_ddp.py
    last.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
