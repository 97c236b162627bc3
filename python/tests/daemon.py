"""Runs kvferryd for a test."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time

BIN = pathlib.Path(os.environ.get("KVFERRY_BIN") or pathlib.Path(__file__).parents[2] / "bin")


def wait_for(condition, timeout_s: float, what: str):
    """Polls until condition() is true and returns its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)
    return value


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as s:
        s.bind((host, 0))
        return s.getsockname()[1]


class Daemon:
    """A node. The pool's file lives as long as the object, so that a restarted daemon finds it. watchdog_s: it is supervised, and so is lent blocks to write."""

    def __init__(
        self,
        directory: pathlib.Path,
        host: str = "127.0.0.1",
        pool: str = "256MiB",
        slab: str = "16MiB",
        prefix=(),
        watchdog_s: float = 0,
        **extra,
    ):
        directory.mkdir(parents=True, exist_ok=True)
        # Paths of unix sockets are short, those of temporary folders are not.
        self.directory = pathlib.Path("/dev/shm") / f"kvferry-test-{os.getpid()}-{free_port(host) if host == '127.0.0.1' else host}"
        self.directory.mkdir(mode=0o700)
        self.log_path = directory / "kvferryd.log"
        self.engine_socket = str(self.directory / "engine.sock")
        self.prefix = list(prefix)
        self.config = {
            "node": directory.name,
            "sockets": {"dir": str(self.directory)},
            "pool": {"path": str(self.directory / "pool"), "size": pool, "slab": slab},
            "peer": {"listen": f"{host}:{free_port(host)}" if host == "127.0.0.1" else f"{host}:7400"},
            "data": {"listen": f"{host}:{free_port(host)}" if host == "127.0.0.1" else f"{host}:7401"},
            "metrics": {"listen": ""},
            **extra,
        }
        self.config_path = directory / "kvferryd.yaml"
        self.config_path.write_text(json.dumps(self.config))  # JSON is YAML
        self.address = self.config["peer"]["listen"]
        self.flags = ["--supervise", f"--watchdog-timeout={watchdog_s}s"] if watchdog_s else []
        self.process: subprocess.Popen | None = None
        self.start()

    def start(self) -> None:
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, BIN / "kvferryd", "--config", self.config_path, *self.flags], stdout=log, stderr=log
            )
        wait_for(self._up, 20, f"kvferryd serves; see {self.log_path}")

    def _up(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log_path.read_text()
        with socket.socket(socket.AF_UNIX) as s:
            return s.connect_ex(str(self.directory / "admin.sock")) == 0

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def _signal(self, number: int) -> None:
        """To the daemon itself, where it is supervised; to none while its watchdog waits before it starts the next."""
        pids = [self.process.pid]
        if self.flags:
            of_threads = pathlib.Path(f"/proc/{pids[0]}/task").glob("*/children")
            pids = [int(pid) for children in of_threads for pid in children.read_text().split()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def cli(self, *args: str):
        """What `kvferry ARGS -o json` says."""
        command = [BIN / "kvferry", "--socket", self.directory / "admin.sock", "-o", "json", *args]
        run = subprocess.run(command, capture_output=True, text=True, timeout=20)
        assert run.returncode in (0, 1), run.stderr
        return json.loads(run.stdout)

    def attached(self, workers: int) -> bool:
        """Whether an engine of so many ranks is attached."""
        status = self.cli("status")
        return status["workers"] == workers and status["schedulers"] == 1

    def gone(self) -> bool:
        """Whether nothing of any engine is left: no session, lease or pin."""
        status = self.cli("status")
        tiers = [t["leased_blocks"] + t["pinned_slots"] for t in status["tiers"]]
        return status["workers"] == status["schedulers"] == sum(tiers) == 0

    def blocks(self, tier: str = "dram") -> int:
        return next((t.get("blocks", 0) for t in self.cli("status")["tiers"] if t["tier"] == tier), 0)

    def counted(self) -> dict[str, int]:
        """By name and reason, since the daemon's start."""
        return {f"{c['name']}:{c['reason']}": int(c["value"]) for c in self.cli("status")["counters"]}

    def open_offers(self) -> int:
        return self.cli("status")["offers_open"]

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> "Daemon":
        return self

    def __exit__(self, *exc) -> None:
        self.close()
