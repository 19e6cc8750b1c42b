"""Real ranks: one process each, gloo over loopback, a hard limit on their time, and an exit status each."""

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Ranks are forked from a process that has imported torch and started no thread.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.nn.parallel", "torch._dynamo", "commhooks"])  # DDP imports dynamo


class RankError(AssertionError):
    """Some ranks raised, hung, or exited with another status than 0."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, tmp_path: Path, timeout: float = 60) -> list:
    """What `function(*args)` returns on each rank of a gloo group. Kills those that still run after `timeout`."""
    store = tmp_path / "store"
    store.unlink(missing_ok=True)
    pipes = [_context.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [
        _context.Process(target=_main, args=(rank, world_size, store, pipe, function, args))
        for rank, (_, pipe) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    for _, write in pipes:
        write.close()
    answers = []
    try:
        for read, _ in pipes:
            answers.append(_answer(read, timeout))
        for process in ranks:
            process.join(timeout)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    errors = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
    errors += [f"rank {i} exited with status {p.exitcode}" for i, p in enumerate(ranks) if p.exitcode]
    if errors:
        raise RankError("\n".join(errors))
    return [value for _, value in answers]


def _answer(read: Connection, timeout: float) -> tuple[bool, Any]:
    if not read.poll(timeout):
        return False, f"hung for {timeout} s"
    try:
        return read.recv()
    except EOFError:
        return False, "ended without an answer"


def _main(rank: int, world_size: int, store: Path, pipe: Connection, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
        )
        answer = function(*args)
        dist.barrier()
        pipe.send((True, answer))
    except BaseException:  # noqa: BLE001 - it is reported, and fails the test
        pipe.send((False, traceback.format_exc()))
    finally:
        dist.destroy_process_group()
