"""The link rig: N nodes of M ranks on this machine, each node's network link limited to a given rate.

    python -m benchmarks.rig --nodes 2 --ranks-per-node 1 --rate 100mbit -- python examples/train_ddp.py

Every node is a network namespace; all are joined by a bridge, and both directions of every node's link pass a token
bucket. Ranks of one node talk over its loopback, unthrottled. The command runs once for each rank with the environment
that torchrun would give it. Where the system has no namespaces for us, the rig says so and uses plain loopback.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from benchmarks.namespaces import isolate

PORT = 29511
LINK = "eth0"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
GRACE = 10  # seconds that the other ranks have to end by themselves once one has failed


class RigError(RuntimeError):
    """A rank failed or took too long."""


class Rig:
    """Nodes, their links, and the ranks on them. Links exist between `with Rig(...)` and its end.

    Args:
        nodes, ranks_per_node: how many.
        rate: of every node's link, each direction, in bit/s; None is unlimited.
        isolated: this process is in namespaces of its own (`isolate`). Otherwise there is one loopback for all.
    """

    def __init__(self, nodes: int, ranks_per_node: int = 1, rate: float | None = None, *, isolated: bool) -> None:
        self.nodes, self.ranks_per_node, self.rate, self.isolated = nodes, ranks_per_node, rate, isolated
        self.world_size = nodes * ranks_per_node

    def __enter__(self) -> "Rig":
        if self.isolated:
            _ip("link set lo up")
            _ip("link add br0 type bridge")
            _ip("link set br0 up")
            for node in range(self.nodes):
                self._add_node(node)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.isolated:
            for node in range(self.nodes):
                _ip(f"link delete port{node}")  # a namespace lets go of its end later, when it likes
                _ip(f"netns delete node{node}")
            _ip("link delete br0")

    def _add_node(self, node: int) -> None:
        name, port = f"node{node}", f"port{node}"
        _ip(f"netns add {name}")
        _ip(f"link add {port} type veth peer name {LINK} netns {name}")
        _ip(f"link set {port} master br0 up")
        _ip(f"-n {name} link set lo up")
        _ip(f"-n {name} addr add 10.99.0.{node + 1}/24 dev {LINK}")
        _ip(f"-n {name} link set {LINK} up")
        if self.rate is not None:
            # A link has no memory of idle times, so the bucket is small: 1 ms, but always a few packets.
            burst = max(8_000, int(self.rate / 8 * 1e-3))
            limit = f"root tbf rate {int(self.rate)}bit burst {burst}b latency 100ms"
            _run(f"tc qdisc add dev {port} {limit}")
            _run(f"tc -n {name} qdisc add dev {LINK} {limit}")

    def on_node(self, node: int, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on a node."""
        return ["nsenter", f"--net=/run/netns/node{node}", *command] if self.isolated else list(command)

    def environment(self, rank: int) -> dict[str, str]:
        """What a rank finds in its environment: torchrun's variables, and which interface its node's link is."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % self.ranks_per_node),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "MASTER_ADDR": "10.99.0.1" if self.isolated else "127.0.0.1",
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": LINK if self.isolated else "lo",
            "OMP_NUM_THREADS": "1",
        }

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float,
        log: Path | None = None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Run the command once for each rank, to the end of all; their output goes to `log`, if there is one.

        `on_tick` is called twice a second meanwhile.

        Raises:
            RigError: a rank exited with another status than 0, or some still ran after `timeout` seconds.
        """
        with Path(log or os.devnull).open("w") as file:
            output = file if log else None
            ranks = [
                subprocess.Popen(
                    self.on_node(rank // self.ranks_per_node, command),
                    env=os.environ | self.environment(rank),
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # a Ctrl-C is ours to handle
                )
                for rank in range(self.world_size)
            ]
            try:
                _wait(ranks, time.monotonic() + timeout, on_tick)
            finally:
                for process in ranks:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
        failed = {rank: process.returncode for rank, process in enumerate(ranks) if process.returncode}
        if failed:
            raise RigError(
                ", ".join(f"rank {rank} ended with status {status}" for rank, status in failed.items())
                + f": {' '.join(command)}"
                + (f" (see {log})" if log else "")
            )

    def measure_rate(self, seconds: float = 1.0) -> float:
        """The bit/s that a TCP stream from the last node to the first puts on the last one's link."""
        probe = [sys.executable, "-m", "benchmarks.link_rate"]
        address = self.environment(0)["MASTER_ADDR"]
        interface = self.environment(0)["GLOO_SOCKET_IFNAME"] if self.nodes > 1 else "lo"
        receiver = subprocess.Popen(self.on_node(0, [*probe, "receive", address]))
        try:
            sender = [*probe, "send", address, "--interface", interface, "--seconds", str(seconds)]
            result = subprocess.run(
                self.on_node(self.nodes - 1, sender), stdout=subprocess.PIPE, check=True, timeout=seconds + 30
            )
            receiver.wait(30)
        finally:
            receiver.kill()
        return float(result.stdout)


def tx_bytes(interface: str) -> int:
    """Bytes that this process's network namespace has sent through the interface."""
    with Path("/proc/self/net/dev").open() as file:
        for line in file:
            name, _, counters = line.partition(":")
            if name.strip() == interface:
                return int(counters.split()[8])
    raise ValueError(f"there is no network interface {interface!r}")


def parse_rate(text: str) -> float | None:
    """'100mbit' is 1e8 bit/s; 'none' is None."""
    if text == "none":
        return None
    for unit, factor in UNITS.items():
        if text.endswith(unit) and text.removesuffix(unit).replace(".", "", 1).isdigit():
            rate = float(text.removesuffix(unit)) * factor
            if rate > 0:
                return rate
    raise argparse.ArgumentTypeError(f"{text!r} is not a rate: write 100mbit, 2.5gbit, 500kbit, or none")


def positive(text: str) -> int:
    """A count of at least 1."""
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")


def isolate_or_say_why() -> bool:
    """Isolate this process; where that is not possible, say so on stderr and go on."""
    reason = isolate()
    if reason:
        print(f"No link rig: {reason}. Ranks run on loopback, unthrottled.", file=sys.stderr)
    return not reason


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float, on_tick: Callable[[], None]) -> None:
    """Until all have ended, or the deadline; shortly after the first failure at the latest."""
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            return
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE)
        on_tick()
        time.sleep(0.5)


def _ip(arguments: str) -> None:
    _run(f"ip {arguments}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RigError(f"{command}: {done.stderr.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=positive, default=2, help="default: %(default)s")
    parser.add_argument("--ranks-per-node", type=positive, default=1, help="default: %(default)s")
    parser.add_argument(
        "--rate", type=parse_rate, default="100mbit", help="of each link, or none (default: %(default)s)"
    )
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for all (default: %(default)s)")
    parser.add_argument("command", nargs="+", help="what every rank runs, behind --")
    args = parser.parse_args()
    isolated = isolate_or_say_why()
    try:
        with Rig(args.nodes, args.ranks_per_node, args.rate, isolated=isolated) as rig:
            print(f"link rate: {rig.measure_rate() / 1e6:.1f} Mbit/s measured", file=sys.stderr)
            rig.run(args.command, timeout=args.timeout)
    except RigError as error:
        sys.exit(f"rig: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
