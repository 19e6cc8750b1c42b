"""A commhooks hook in Lightning, by a callback of a few lines.

    torchrun --nproc-per-node 2 examples/lightning_ddp.py
    torchrun --nproc-per-node 2 examples/lightning_ddp.py --resume build/lightning/last.ckpt

Lightning's own `DDPStrategy(ddp_comm_hook=...)` registers a hook on GPUs only, and says nothing where it does not. The
callback registers it on any device, with the checks of `commhooks.register`. Leave `ddp_comm_hook` out then.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import commhooks


class CompressGradients(lightning.Callback):
    """Registers the hook once Lightning has wrapped the model.

    Residuals are each rank's own, and Lightning's checkpoint is rank 0's: each rank has a file of its own beside it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.resume_step: int | None = None

    def on_fit_start(self, trainer: lightning.Trainer, _module: lightning.LightningModule) -> None:
        ddp = trainer.strategy.model  # a DistributedDataParallel model from here on
        state = commhooks.PowerSGDState(matrix_approximation_rank=2, start_powerSGD_iter=0)
        self.state = commhooks.register(ddp, commhooks.powersgd_hook, state)
        if self.resume_step is not None:
            self.state.load_state_dict(torch.load(self.file(self.resume_step, trainer.global_rank)))

    def on_save_checkpoint(self, trainer: lightning.Trainer, _module: lightning.LightningModule, _: Any) -> None:
        torch.save(self.state.state_dict(), self.file(trainer.global_step, trainer.global_rank))

    def on_load_checkpoint(self, _trainer: Any, _module: Any, checkpoint: dict[str, Any]) -> None:
        self.resume_step = checkpoint["global_step"]  # no hook yet: on_fit_start comes later

    def on_train_end(self, trainer: lightning.Trainer, _module: lightning.LightningModule) -> None:
        commhooks.check_replicas(trainer.strategy.model)
        if trainer.is_global_zero:
            numbers = self.state.metrics()
            print(f"steps {numbers['steps']}   bytes sent {numbers['bytes_sent']:.0f}   ratio {numbers['ratio']:.1f}")

    def file(self, step: int, rank: int) -> Path:
        return self.folder / f"hook-step{step}-rank{rank}.pt"


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.layers(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def points() -> TensorDataset:
    """Points inside (1) and outside (0) a sphere."""
    x = torch.randn(2048, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.norm(dim=1) < 32**0.5).long())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=1, help="in all, resumed ones too (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=1, help="machines (default: %(default)s)")
    parser.add_argument("--devices", type=int, default=2, help="ranks on each (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/lightning"), help="folder (default: %(default)s)")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    args = parser.parse_args()

    lightning.seed_everything(0)
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=args.devices,
        num_nodes=args.nodes,
        strategy=DDPStrategy(),
        max_epochs=args.epochs,
        callbacks=[CompressGradients(args.out), ModelCheckpoint(args.out, save_last=True)],
        default_root_dir=args.out,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), DataLoader(points(), batch_size=64, shuffle=True), ckpt_path=args.resume)


if __name__ == "__main__":
    main()
    last = dist.barrier(async_op=True)  # kept until the end: see train_ddp.py
    last.wait()
    dist.destroy_process_group()
