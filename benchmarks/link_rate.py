"""The rate a link really has: one TCP stream across it, seen from the sender's interface counter."""

import argparse
import socket
import time

from benchmarks.rig import tx_bytes

PORT = 29512
RAMP = 0.5  # seconds until the stream has found its rate and the queues are full
CHUNK = b"\0" * 65536


def receive(address: str) -> None:
    """Take one connection, and read it to its end."""
    with socket.create_server((address, PORT)) as server:
        server.settimeout(30)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(30)
            while connection.recv(len(CHUNK)):
                pass


def send(address: str, interface: str, seconds: float) -> float:
    """Send for `seconds` after the ramp; the bit/s that left the interface in them."""
    with _connect(address) as connection:
        _send_until(connection, time.perf_counter() + RAMP)
        start, before = time.perf_counter(), tx_bytes(interface)
        _send_until(connection, start + seconds)
        return (tx_bytes(interface) - before) * 8 / (time.perf_counter() - start)


def _connect(address: str) -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=30)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _send_until(connection: socket.socket, end: float) -> None:
    while time.perf_counter() < end:
        connection.sendall(CHUNK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["send", "receive"])
    parser.add_argument("address")
    parser.add_argument("--interface", default="lo")
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()
    if args.role == "receive":
        receive(args.address)
    else:
        print(send(args.address, args.interface, args.seconds))


if __name__ == "__main__":
    main()
