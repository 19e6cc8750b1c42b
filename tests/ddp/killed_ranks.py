"""A program: ranks that train until one of them is killed or stopped. Writes how the others ended, as JSON.

    python killed_ranks.py FOLDER WORLD_SIZE TIMEOUT_S TRIALS

TRIALS is a JSON list of {"hook", "executor", "signal", "victim", "delay"}: `delay` seconds after all ranks train, the
rank `victim` gets the signal. Ranks are forked from a process that has imported everything, and end as any interpreter
does: nothing catches what they raise.
"""

import json
import os
import select
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # DDP imports it
import torch.distributed as dist
from models import linears, register, train
from torch.nn.parallel import DistributedDataParallel as DDP

GRACE = 60  # seconds: for a busy machine, and so that nobody trains on who is not heard of any more


def train_on(trial: dict, rank: int, world_size: int, timeout: float, store: Path, started: int) -> None:
    end = time.monotonic() + timeout + 2 * GRACE
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=limit)
    ddp = DDP(linears(6), bucket_cap_mb=0.02)
    register(ddp, trial["hook"], executor=trial["executor"])
    train(ddp, 2)
    os.write(started, b".")
    while time.monotonic() < end:
        train(ddp, 1)


def attempt(trial: dict, world_size: int, timeout: float, folder: Path) -> list[dict]:
    """Each survivor's rank, exit status (None: it hung), seconds from the signal to its end, and stderr."""
    folder.mkdir()
    all_started, started = os.pipe()
    ranks: dict[int, int] = {}
    for rank in range(world_size):
        process = os.fork()
        if process == 0:
            os.dup2(os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT), 2)
            train_on(trial, rank, world_size, timeout, folder / "store", started)
            sys.exit()
        ranks[process] = rank
    os.close(started)
    for _ in ranks:
        if not select.select([all_started], [], [], GRACE)[0] or not os.read(all_started, 1):
            raise RuntimeError("\n".join((folder / str(rank)).read_text() for rank in ranks.values()))
    os.close(all_started)
    time.sleep(trial["delay"])
    return survivors(ranks, trial, timeout, folder)


def survivors(ranks: dict[int, int], trial: dict, timeout: float, folder: Path) -> list[dict]:
    (victim,) = (process for process, rank in ranks.items() if rank == trial["victim"])
    os.kill(victim, signal.Signals[trial["signal"]])
    begin = time.monotonic()
    ends = {}
    while len(ends) < len(ranks) - 1 and time.monotonic() < begin + timeout + GRACE:
        time.sleep(0.01)
        for process in ranks.keys() - ends.keys() - {victim}:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                ends[process] = {"status": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - begin}
    for process in ranks.keys() - ends.keys():
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    hung = {"status": None, "seconds": None}
    return [
        {"rank": rank, "stderr": (folder / str(rank)).read_text()} | ends.get(process, hung)
        for process, rank in ranks.items()
        if process != victim
    ]


def main() -> None:
    torch.set_num_threads(1)
    folder, world_size, timeout, trials = sys.argv[1:]
    ends = [
        attempt(trial, int(world_size), float(timeout), Path(folder) / str(number))
        for number, trial in enumerate(json.loads(trials))
    ]
    sys.stdout.write(json.dumps(ends))


if __name__ == "__main__":
    main()
