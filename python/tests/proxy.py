"""The reference proxy (examples/pd-proxy) as a process."""

import pathlib
import subprocess
import time
import urllib.request

from daemon import BIN, free_port, wait_for


class Proxy:
    """prefill and decode are what its flags take: URL[,peer=HOST:PORT]. Serves when it is made."""

    def __init__(self, directory: pathlib.Path, prefill: list[str], decode: list[str], *arguments: str):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = directory / f"pd-proxy-{port}.log"
        engines = [*(f"--prefill={e}" for e in prefill), *(f"--decode={e}" for e in decode)]
        with open(self.log_path, "wb") as log:
            command = [BIN / "pd-proxy", f"--listen=127.0.0.1:{port}", *engines, *arguments]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_for(self._up, 20, f"pd-proxy serves; see {self.log_path}")
        except BaseException:
            self.close()
            raise

    def _up(self) -> bool:
        assert self.process.poll() is None, self.log_path.read_text()
        try:
            with urllib.request.urlopen(self.url + "/healthz", timeout=5):
                return True
        except OSError:
            time.sleep(0.02)
            return False

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *exc) -> None:
        self.close()
