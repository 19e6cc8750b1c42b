"""A network of one's own: this process moves into new network, mount and process namespaces.

Whatever is set up inside (interfaces, named network namespaces, processes) ends with the process, however it ends: the
kernel kills what is left in the process namespace and frees the rest. As root nothing else is needed; an ordinary user
gets the rights through a user namespace, where the system allows one.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG = 1
GRACE = 5  # seconds that an interrupted program has to tidy up the terminal

_libc = ctypes.CDLL(None, use_errno=True)


def isolate() -> str | None:
    """Go on inside new namespaces, in a child of this process, which stays behind and exits with the child's status.

    Returns:
        None inside; or, where the system does not allow it, one sentence that says why, and nothing has changed.
        Call it first thing: threads do not survive the fork.
    """
    missing = [tool for tool in ("ip", "tc", "nsenter", "mount") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (install iproute2 and util-linux)"
    sys.stdout.flush()
    read, write = os.pipe()
    lifeline, held = os.pipe()  # `held` is open as long as this process lives, and nowhere else
    child = os.fork()
    if child == 0:
        os.close(read)
        os.close(held)
        _enter(write)  # returns in the process that goes on
        Thread(target=_end_with, args=(lifeline,), daemon=True).start()
        return None
    os.close(write)
    os.close(lifeline)
    with os.fdopen(read) as answers:
        reason = answers.read()  # to the end of file: until the child is inside, or has given up
    if reason:
        os.waitpid(child, 0)
        return reason
    _exit_with(child)
    return None


def _enter(answer: int) -> None:
    """In the child: unshare, then fork once more, for only a child of the process that unshared is inside."""
    _die_with_parent()
    try:
        _unshare()
        child = os.fork()
        if child == 0:
            _die_with_parent()
            subprocess.run(["mount", "--make-rprivate", "/"], check=True, capture_output=True)
            subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True, capture_output=True)
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True, capture_output=True)
            os.close(answer)
            return
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", b"").decode().strip() or str(error)
        os.write(answer, f"the system allows no network namespaces here ({detail})".encode())
        os._exit(1)
    os.close(answer)
    _exit_with(child)


def _unshare() -> None:
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET
    if uid == 0 and _libc.unshare(flags) == 0:
        return
    if _libc.unshare(flags | CLONE_NEWUSER) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    for name, text in (("uid_map", f"0 {uid} 1"), ("setgroups", "deny"), ("gid_map", f"0 {gid} 1")):
        Path(f"/proc/self/{name}").write_text(text)


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with(lifeline: int) -> None:
    """A second way to die with the first process: the kernel's signal was once seen not to end the namespace."""
    os.read(lifeline, 1)  # returns at its end
    os._exit(1)


def _exit_with(child: int) -> None:
    """Wait for the child and exit as it did. Dying earlier takes it along."""
    interrupted = False

    def on_interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True  # a terminal has sent it to the child as well
        signal.alarm(GRACE)

    signal.signal(signal.SIGINT, on_interrupt)
    _, status = os.waitpid(child, 0)  # goes on after a signal, until the alarm ends this process
    os._exit(130 if interrupted else abs(os.waitstatus_to_exitcode(status)))
