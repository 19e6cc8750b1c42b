"""Ranks that torchrun starts, with a hard limit on their time."""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


class Run:
    """torchrun at work on a script and its arguments.

    Args:
        arguments: the script's path, and what follows it.
        ranks: on this torchrun's node.
        rendezvous: torchrun's options for it.
    """

    def __init__(self, *arguments: object, ranks: int = 2, rendezvous: tuple[str, ...] = ("--standalone",)) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, f"--nproc-per-node={ranks}"]
        self._log = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115 - open for as long as this lives
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)], cwd=ROOT, env=ENVIRONMENT, stdout=self._log, stderr=self._log
        )

    @property
    def output(self) -> str:
        """What all ranks have printed up to now."""
        return Path(self._log.name).read_text()

    def wait_for(self, pattern: str, timeout: float = 60) -> re.Match[str]:
        """Until a rank has printed this."""
        deadline = time.monotonic() + timeout
        while not (found := re.search(pattern, self.output)):
            assert self.process.poll() is None, f"torchrun ended before {pattern!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {pattern!r} after {timeout} s:\n{self.output}"
            time.sleep(0.05)
        return found

    def finish(self, timeout: float) -> int:
        """The exit status. What has not ended after `timeout` seconds fails the test."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.process.args} hung for {timeout} s:\n{self.output}") from None

    def end(self) -> None:
        """torchrun ends its ranks when told to end; it gives them 30 s."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(45)
            finally:
                self.process.kill()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._log.close()


def torchrun(*arguments: object, ranks: int = 2, timeout: float = 100) -> str:
    """All that the script's ranks print; they must succeed."""
    with Run(*arguments, ranks=ranks) as run:
        status = run.finish(timeout)
        assert status == 0, run.output
        return run.output


def metrics(output: str) -> tuple[int, int, float]:
    """Steps, bytes sent and ratio, as the examples print them at their end."""
    steps, sent, ratio = re.findall(r"steps (\d+)   bytes sent (\d+)   ratio ([\d.]+)", output)[-1]
    return int(steps), int(sent), float(ratio)
