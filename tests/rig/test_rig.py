"""The link rig with real namespaces, links and processes."""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.rig import parse_rate

ROOT = Path(__file__).parents[2]
RIG = [sys.executable, "-m", "benchmarks.rig"]


def can_isolate() -> bool:
    """In a process of its own, for `isolate` goes on in a child."""
    code = "import sys; from benchmarks.namespaces import isolate; sys.exit(bool(isolate()))"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


needs_namespaces = pytest.mark.skipif(not can_isolate(), reason="the system allows no network namespaces")


def rig(*arguments, timeout=60, **options):
    return subprocess.run(
        [*RIG, *arguments], capture_output=True, text=True, timeout=timeout, cwd=ROOT, check=False, **options
    )


def network() -> list[str]:
    """What a rig could leave behind: interfaces and named namespaces."""
    done = [subprocess.run(command.split(), capture_output=True, text=True, check=True).stdout
            for command in ("ip -o -br link", "ip netns list")]  # fmt: skip
    return [line.split()[0] for text in done for line in text.splitlines()]


def processes(mark: str) -> list[str]:
    done = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if mark in line and "ps -eo" not in line]


@needs_namespaces
@pytest.mark.parametrize("rate", [20, 200])
def test_the_link_has_the_rate_asked_for(rate):
    done = rig(f"--rate={rate}mbit", "--", "true")
    assert done.returncode == 0, done.stderr
    measured = float(done.stderr.split("link rate: ")[1].split()[0])
    assert measured == pytest.approx(rate, rel=0.1)


COUNT = """
import os, torch, torch.distributed as dist
from benchmarks.rig import tx_bytes
dist.init_process_group("gloo")
rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
x = torch.ones(1_000_000)
dist.all_reduce(x)
dist.barrier()
before = tx_bytes("eth0")
dist.all_reduce(x)
dist.barrier()
if local == 0:
    os.write(1, f"sent {tx_bytes('eth0') - before}\\n".encode())  # whole lines, though ranks share the pipe
last = dist.barrier(async_op=True)
last.wait()
dist.destroy_process_group()
"""


@needs_namespaces
def test_the_counter_agrees_with_a_known_transfer():
    """A ring all-reduce of S bytes among W ranks sends 2 (W - 1) / W S a rank.

    TCP's headers and acknowledgements are 7 % more. At this rate no queue overflows, so no packet is sent twice.
    """
    done = rig(
        "--rate=100mbit", "--", sys.executable, "-W", "ignore", "-c", COUNT, env=os.environ | {"PYTHONPATH": "."}
    )
    assert done.returncode == 0, done.stderr
    for sent in [int(line.split()[1]) for line in done.stdout.splitlines()]:
        assert 4e6 <= sent <= 1.1 * 4e6


ENVIRONMENT = """
import os
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
os.write(1, (" ".join(os.environ[name] for name in names) + "\\n").encode())
"""


@needs_namespaces
def test_ranks_of_several_nodes():
    done = rig("--nodes=3", "--ranks-per-node=2", "--rate=none", "--", sys.executable, "-c", ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} {rank % 2} 6 2" for rank in range(6)]


@needs_namespaces
def test_a_failing_rank_ends_the_others():
    code = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(600)"
    done = rig("--", sys.executable, "-c", code)
    assert done.returncode == 1
    assert "rank 1 ended with status 3" in done.stderr


@needs_namespaces
def test_a_timeout_ends_all():
    done = rig("--timeout=1", "--", "sleep", "600")
    assert done.returncode == 1
    assert "ended with status -9" in done.stderr


@needs_namespaces
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind(how):
    """Ctrl-C goes to the whole process group, as from a terminal; the others to the rig alone."""
    before = network()
    mark = f"sleep 98765.{how}"
    process = subprocess.Popen([*RIG, "--", *mark.split()], cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(processes(mark)) < 3:  # the rig itself, and a rank on each of two nodes
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    process.wait(20)
    while processes(mark):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert network() == before


@needs_namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user is what the other tests run as then")
def test_without_capabilities_a_user_namespace_serves():
    done = subprocess.run(
        ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *RIG, "--rate=20mbit", "--", "true"],
        capture_output=True, text=True, timeout=60, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "measured" in done.stderr


def test_without_namespaces_it_says_so_and_runs_on_loopback():
    """An empty PATH: there are no tools to set up a network with."""
    done = rig("--", sys.executable, "-c", "import os; print(os.environ['MASTER_ADDR'])", env={"PATH": ""})
    assert done.returncode == 0, done.stderr
    assert "No link rig: ip and tc and nsenter and mount not found" in done.stderr
    assert done.stdout.split() == ["127.0.0.1"] * 2


@pytest.mark.parametrize("text", ["100", "mbit", "-1mbit", "0mbit", "1e3mbit", "fast"])
def test_bad_rates_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a rate"):
        parse_rate(text)


def test_rates():
    assert [parse_rate(x) for x in ("100mbit", "2.5gbit", "500kbit", "none")] == [1e8, 2.5e9, 5e5, None]
