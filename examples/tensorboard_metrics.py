"""What a hook sends, into TensorBoard.

    torchrun --nproc-per-node 2 examples/tensorboard_metrics.py
    tensorboard --logdir build/tensorboard

`state.metrics()` is a dict of plain numbers, so any logger takes it: `wandb.log(state.metrics())`.
"""

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

import commhooks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--every", type=int, default=10, help="steps between two entries (default: %(default)s)")
    parser.add_argument("--out", default="build/tensorboard", help="folder (default: %(default)s)")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(minutes=2))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device))
    state = commhooks.TopKState(density=0.05, warmup_steps=20)
    commhooks.register(ddp, commhooks.topk_hook, state)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)

    writer = SummaryWriter(args.out) if dist.get_rank() == 0 else None  # counters are a rank's own: one rank writes
    for step in range(1, args.steps + 1):
        loss = (ddp(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if writer and step % args.every == 0:
            writer.add_scalar("loss", loss.item(), step)
            for name, value in state.metrics().items():
                writer.add_scalar(f"commhooks/{name}", value, step)
    if writer:
        writer.close()
        print(f"wrote {', '.join(state.metrics())} to {args.out}")

    last = dist.barrier(async_op=True)  # kept until the end: see train_ddp.py
    last.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
