"""vLLM's API server as a process, and requests to it."""

import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.request

from daemon import free_port, wait_for
from engine import ENVIRONMENT, PATIENT, end

START_TIMEOUT_S = 240


def post(url: str, body: dict, timeout_s: float = 120) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        text = answer.read()
    return json.loads(text) if text else {}


class ApiServer:
    """Does not wait until it serves: wait() does."""

    def __init__(self, model: str, directory: pathlib.Path, daemon, *arguments: str):
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = directory / f"api-{self.port}.log"
        transfer = {"kv_connector": "KVFerryConnector", "kv_role": "kv_both", "kv_connector_extra_config": PATIENT}
        command = [
            *(
                sys.executable,
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--model",
                model,
                "--port",
                str(self.port),
                "--host",
                "127.0.0.1",
            ),
            *("--enforce-eager", "--dtype", "float32", "--max-num-seqs", "1", "--prefix-caching-hash-algo", "sha256_cbor"),
            *("--served-model-name", "tiny", "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer), *arguments),
        ]
        env = {**os.environ, **ENVIRONMENT, "KVFERRY_SOCKET": daemon.engine_socket, "VLLM_SERVER_DEV_MODE": "1"}
        del env["VLLM_ENABLE_V1_MULTIPROCESSING"]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env, process_group=0)

    def wait(self) -> "ApiServer":
        wait_for(self._up, START_TIMEOUT_S, f"the API server serves; see {self.log_path}")
        return self

    def _up(self) -> bool:
        assert self.process.poll() is None, self.log_path.read_text(errors="replace")[-4000:]
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5):
                return True
        except OSError:
            time.sleep(0.2)
            return False

    def complete(self, prompt: list[int], count: int = 12, **fields) -> dict:
        return complete(self.url, prompt, count, **fields)

    def metrics(self) -> dict[str, float]:
        """Our counters, summed over labels."""
        sums: dict[str, float] = {}
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith("vllm:kvferry_"):
                    name = line.split("{")[0].removeprefix("vllm:kvferry_")
                    sums[name] = sums.get(name, 0) + float(line.rsplit(" ", 1)[1])
        return sums

    def close(self) -> None:
        end(self.process)

    def __enter__(self) -> "ApiServer":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def complete(url: str, prompt: list[int], count: int = 12, **fields) -> dict:
    """tokens, cached (tokens not computed), seconds."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    began = time.monotonic()
    answer = post(url + "/v1/completions", body)
    details = answer["usage"].get("prompt_tokens_details") or {}
    return {
        "tokens": answer["choices"][0]["token_ids"],
        "cached": details.get("cached_tokens") or 0,
        "seconds": time.monotonic() - began,
    }
