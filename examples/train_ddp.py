"""Train a small byte-level GPT under DistributedDataParallel, with or without a gradient-compression hook.

    torchrun --nproc-per-node 2 examples/train_ddp.py --hook powersgd

The text is the source of Python's standard library, which every installation carries. The one line that a training
script needs for compression is marked below.
"""

import argparse
import os
import sysconfig
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks

HOOKS = ["none", "allreduce", "bf16", "fp16", "powersgd", "powersgd-alternating"]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, time, width / heads)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, width: int = 192, depth: int = 4, heads: int = 6, context: int = 64) -> None:
        super().__init__()
        self.context = context
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time)
        h = self.bytes(x) + self.positions.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(h)))


def standard_library_text() -> Tensor:
    """The standard library's own source files, as one tensor of bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(f for f in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(f.parts))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batches(text: Tensor, batch: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random pieces of the text and, for each byte of them, the next one: both (batch, context)."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        pieces = text[starts + torch.arange(context + 1)].long()
        yield pieces[:, :-1], pieces[:, 1:]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def register(ddp: DistributedDataParallel, hook: str, rank: int) -> None:
    if hook == "allreduce":
        ddp.register_comm_hook(None, commhooks.allreduce_hook)
    elif hook == "bf16":
        ddp.register_comm_hook(None, commhooks.bf16_hook)
    elif hook == "fp16":
        ddp.register_comm_hook(None, commhooks.fp16_hook)
    elif hook.startswith("powersgd"):
        state = commhooks.PowerSGDState(
            matrix_approximation_rank=rank, start_powerSGD_iter=0, alternating=hook.endswith("alternating")
        )
        ddp.register_comm_hook(state, commhooks.powersgd_hook)  # <- the one line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", choices=HOOKS, default="powersgd", help="what to register (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=4, help="of PowerSGD's factors (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="pieces of text a rank and step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's learning rate (default: %(default)s)")
    parser.add_argument("--bucket-cap-mb", type=float, default=1, help="DDP's bucket size (default: %(default)s)")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(minutes=2))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = GPT().to(device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=args.bucket_cap_mb, gradient_as_bucket_view=True)
    register(ddp, args.hook, args.rank)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr)

    data = batches(standard_library_text(), args.batch, model.context, seed=1 + dist.get_rank())
    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        x, y = (t.to(device) for t in next(data))
        loss = loss_of(ddp, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:4d}   loss {loss.item():.3f}   {(time.perf_counter() - start) / step * 1e3:.0f} ms/step")

    # gloo's thread lets go of a collective a moment after wait() has returned, and needs the interpreter for it: kept
    # until the end, the last one cannot come too late, which would abort the process now and then.
    last = dist.barrier(async_op=True)
    last.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
