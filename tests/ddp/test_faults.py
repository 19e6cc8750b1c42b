"""A rank that dies or stands still in mid-training: the others end with an error that says where."""

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from models import HOOKS

ROOT = Path(__file__).parents[2]
WORLD_SIZE = 4
NOTE = re.compile(r"in commhooks (\w+), step (\d+), bucket (\d+) \(parameters: (\d+\.(weight|bias)(, )?)+\)")
pytestmark = pytest.mark.timeout(300)
CASES = list(itertools.product(HOOKS, ["inline", "pipelined"]))


def trials(number, name, seed):
    random_numbers = random.Random(seed)
    random_numbers.shuffle(cases := CASES.copy())
    return [
        {
            "hook": hook,
            "executor": executor,
            "signal": name,
            "victim": random_numbers.randrange(WORLD_SIZE),
            "delay": random_numbers.uniform(0, 0.5),
        }
        for hook, executor in itertools.islice(itertools.cycle(cases), number)
    ]


def ends(tmp_path, attempts, timeout):
    """What killed_ranks.py writes. Nothing of it is left running."""
    command = [sys.executable, Path(__file__).with_name("killed_ranks.py")]
    command += [tmp_path / "trials", str(WORLD_SIZE), str(timeout), json.dumps(attempts)]
    (tmp_path / "trials").mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    program = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = program.communicate(timeout=60 + len(attempts) * (timeout + 60))
    finally:
        orphans = members(program.pid)
        for process in orphans:
            os.kill(process, signal.SIGKILL)
        program.wait()
    assert program.returncode == 0, errors
    assert not orphans, orphans
    return json.loads(output)


def members(group):
    """The processes of a process group, and what they are."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(folder.name)) == group:
                found[int(folder.name)] = (folder / "status").read_text()
        except (ProcessLookupError, FileNotFoundError):
            pass  # it has ended meanwhile
    return found


def check_end(trial, end):
    """An error and no hang; and where the error came out of a hook call, the note that names the place."""
    assert end["status"] not in (0, None), (trial, end)
    assert "RuntimeError" in end["stderr"], (trial, end)
    note = NOTE.search(end["stderr"])
    assert bool(note) == ("commhooks/executor.py" in end["stderr"]), (trial, end)
    if note:
        assert trial["hook"].startswith(note[1]), (trial, end)
        assert int(note[2]) >= 2
    return bool(note)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
def test_kill_of_any_rank_at_any_moment(tmp_path, kills):
    attempts = trials(kills, "SIGKILL", seed=kills)
    noted = [
        check_end(trial, end)
        for trial, survivors in zip(attempts, ends(tmp_path, attempts, timeout=10), strict=True)
        for end in survivors
    ]
    assert len(noted) == kills * (WORLD_SIZE - 1)
    assert sum(noted) > len(noted) / 2


def test_rank_that_stands_still(tmp_path):
    """Its connections stay open: only the group's timeout tells."""
    attempts = trials(1, "SIGSTOP", seed=0)
    (survivors,) = ends(tmp_path, attempts, timeout=3)
    noted = [check_end(attempts[0], end) for end in survivors]
    assert any(noted)
