"""Hosts on one machine: each has its own network, processes, /tmp, /dev/shm and home, and a cable
to a common switch that can be pulled.

Made of Linux namespaces, which needs root and iproute2. Test processes that run at the same time
have a switch and addresses each.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.paths import SOURCE_ROOT
from tests.cluster.processes import TEST_PROCESS, descendants, wait_until

SWITCH = f"eagleray{TEST_PROCESS}"
NETWORK = f"10.77.{TEST_PROCESS}"
TOOLS = ("ip", "unshare", "nsenter", "mount")
# Run as the first process of a host, from which all others in it descend.
INIT = """
mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm &&
mkdir /tmp/upper /tmp/work /tmp/run &&
mount -t overlay overlay -o lowerdir=$HOME,upperdir=/tmp/upper,workdir=/tmp/work $HOME &&
hostname $1 && ip link set lo up && echo ready && exec sleep infinity
"""


def why_not() -> str | None:
    """Why hosts cannot be made here; None if they can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed (Debian: iproute2, util-linux)"
    for place in (SOURCE_ROOT, Path(sys.prefix)):
        if place.is_relative_to("/tmp"):
            return f"hosts do not see {place}: each has a /tmp of its own"
    made = subprocess.run(
        ["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no namespaces can be made: {made.stderr.strip()}" if made.returncode else None


class Host:
    """One host; `number` is the last part of its address."""

    def __init__(self, number: int) -> None:
        self.name = f"host{number}"
        self.address = f"{NETWORK}.{number}"
        self._cable = f"{SWITCH}_{number}"
        flags = ["--net", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc"]
        self._init = subprocess.Popen(
            ["unshare", *flags, "sh", "-c", INIT, "init", self.name],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._init.stdout is not None
        assert self._init.stdout.readline() == "ready\n"
        [self.pid] = descendants(self._init.pid)
        remove_link(self._cable)
        ip("link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self.pid)
        ip("link", "set", self._cable, "master", SWITCH, "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start a process in this host."""
        enter = ["nsenter", "--target", str(self.pid), "--net", "--pid", "--mount", "--uts", "--"]
        return subprocess.Popen([*enter, *command], text=True, **options)

    def run(self, *command: str, limit_s: float = 60.0, **options: Any) -> str:
        """Run a command and return its output. Raises `RuntimeError` with the output unless it
        exits with 0.
        """
        process = self.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
        said, _ = process.communicate(timeout=limit_s)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} on {self.name}: {said}")
        return said

    def commands(self) -> list[str]:
        """The command lines of its processes."""
        return self.run("ps", "-eo", "args", "--no-headers").splitlines()

    def pull_cable(self) -> None:
        """From now on packets are lost in both directions; no connection is closed."""
        ip("link", "set", self._cable, "down")

    def plug_cable(self) -> None:
        ip("link", "set", self._cable, "up")

    def close(self) -> None:
        self._init.send_signal(signal.SIGKILL)  # and with it every process of the host
        self._init.wait()
        wait_until(lambda: not Path(f"/proc/{self.pid}").exists(), f"the end of {self.name}")


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """This many hosts, on a switch to which this machine is connected too, as number 1."""
    remove_link(SWITCH)
    ip("link", "add", SWITCH, "type", "bridge")
    made: list[Host] = []
    try:
        ip("addr", "add", f"{NETWORK}.1/24", "dev", SWITCH)
        ip("link", "set", SWITCH, "up")
        made.extend(Host(10 + number) for number in range(count))
        yield made
    finally:
        for host in made:
            host.close()
        remove_link(SWITCH)


def remove_link(name: str) -> None:
    """Remove what a run that was killed may have left."""
    subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False)


def ip(*arguments: Any) -> None:
    subprocess.run(["ip", *map(str, arguments)], check=True)
