"""Two nodes for a test: a daemon each, in network namespaces of their own, or on two loopback addresses where those cannot be made."""

import os
import pathlib
import subprocess
import sys

from daemon import Daemon


def _ip(*args: str) -> bool:
    try:
        return subprocess.run(["ip", *args], capture_output=True, timeout=10).returncode == 0
    except FileNotFoundError:
        return False


class TwoNodes:
    """a and b are daemons; how says what separates them."""

    def __init__(self, directory: pathlib.Path, **config):
        self.names = [f"kvferry-{os.getpid()}-{n}" for n in "ab"]
        self.how = "two network namespaces" if self._make() else "two loopback addresses (no network namespaces here)"
        self.a: Daemon | None = None
        self.b: Daemon | None = None
        try:
            for n, node in enumerate("ab"):
                if self.how.startswith("two network"):
                    host, prefix = f"10.213.7.{n + 1}", ("ip", "netns", "exec", self.names[n])
                else:
                    host, prefix = f"127.0.0.{n + 2}", ()
                setattr(self, node, Daemon(directory / node, host=host, prefix=prefix, **config))
        except BaseException:
            self.close()
            raise
        print(f"nodes: {self.how}", file=sys.stderr)

    def _make(self) -> bool:
        a, b = self.names
        wires = ["va" + str(os.getpid()), "vb" + str(os.getpid())]
        made = _ip("netns", "add", a) and _ip("netns", "add", b) and _ip("link", "add", wires[0], "type", "veth", "peer", "name", wires[1])
        for n, (name, wire) in enumerate(zip(self.names, wires)):
            made = made and _ip("link", "set", wire, "netns", name) and _ip("-n", name, "addr", "add", f"10.213.7.{n + 1}/24", "dev", wire)
            made = made and _ip("-n", name, "link", "set", wire, "up") and _ip("-n", name, "link", "set", "lo", "up")
        if not made:
            self._remove()
        return made

    def limit(self, mbit: int) -> bool:
        """Lets node a send no faster; 0 ends that. False where it cannot be done."""
        device = f"va{os.getpid()}"
        if not mbit:
            return _ip("netns", "exec", self.names[0], "tc", "qdisc", "del", "dev", device, "root")
        bucket = ("tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "50ms")
        return _ip("netns", "exec", self.names[0], "tc", "qdisc", "add", "dev", device, "root", *bucket)

    def _remove(self) -> None:
        for name in self.names:
            _ip("netns", "del", name)  # and the link with it

    def close(self) -> None:
        for daemon in (self.a, self.b):
            if daemon is not None:
                daemon.close()
        self._remove()

    def __enter__(self) -> "TwoNodes":
        return self

    def __exit__(self, *exc) -> None:
        self.close()
