"""What test_lightning.py's ranks do, in one launch: Lightning's own way, the example, and the example resumed.

The first argument is a folder.
"""

import sys
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from launch import EXAMPLES
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

import commhooks

sys.path.insert(0, str(EXAMPLES))
import lightning_ddp


def lightnings_own_way():
    state = commhooks.HookState()
    strategy = DDPStrategy(ddp_comm_state=state, ddp_comm_hook=commhooks.allreduce_hook)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(lightning_ddp.Classifier(), DataLoader(lightning_ddp.points(), batch_size=64))
    print(f"Lightning's own way: {state.metrics()['steps']} steps", flush=True)  # noqa: T201 - for the test


def run_example(*arguments):
    sys.argv = ["lightning_ddp.py", *map(str, arguments)]
    lightning_ddp.main()


def main():
    folder = Path(sys.argv[1])
    lightnings_own_way()
    run_example("--out", folder)
    saved = torch.load(folder / "hook-step16-rank1.pt")
    print(f"saved at step {saved['step']}", flush=True)  # noqa: T201 - for the test
    run_example("--out", folder, "--epochs", 2, "--resume", folder / "last.ckpt")


if __name__ == "__main__":
    main()
    last = dist.barrier(async_op=True)  # kept until the end: see examples/train_ddp.py
    last.wait()
    dist.destroy_process_group()
