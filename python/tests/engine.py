"""A vLLM engine in a process of its own, driven by a test.

The process makes an LLM and then runs functions of engine_actions.py that it is told by name, one JSON line for a call and one for an answer.
"""

import contextlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time

# On a busy machine the defaults are sometimes too short, and then a prompt is computed: right, but not what a test wants to see.
PATIENT = {"match_wait_ms": 10000, "match_timeout_ms": 10000, "load_timeout_ms": 30000, "hold_ms": 20000}
START_TIMEOUT_S = 180.0
CALL_TIMEOUT_S = 120.0

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
}


def end(process: subprocess.Popen) -> None:
    """Kills an engine, also how a real one may end. What it started notices that, and removes the engine's shared memory."""
    process.kill()
    process.wait(30)
    deadline = time.monotonic() + 10
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)


class EngineError(Exception):
    pass


class Engine:
    """connector: kv_connector_extra_config, or None for an engine without kvferry. options go to LLM()."""

    def __init__(
        self, model: str, directory: pathlib.Path, daemon=None, connector: dict | None = None, environment=(), prefix=(), **options
    ):
        directory.mkdir(parents=True, exist_ok=True)
        self.log_path = directory / f"engine-{time.monotonic_ns()}.log"
        llm = {
            "model": model,
            "enforce_eager": True,
            "max_model_len": 4096,
            "max_num_seqs": 1,
            "dtype": "float32",
            "seed": 0,
            "disable_log_stats": False,
            "enable_prefix_caching": True,
            "prefix_caching_hash_algo": "sha256_cbor",
            **options,
        }
        if daemon is not None or connector is not None:
            llm["kv_transfer_config"] = {
                "kv_connector": "KVFerryConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {**PATIENT, **(connector or {})},
            }
        env = {**os.environ, **ENVIRONMENT, **dict(environment)}
        if daemon is not None:
            env["KVFERRY_SOCKET"] = daemon.engine_socket
        # A test that prints to stdout must not disturb the answers, so these have a pipe of their own.
        read, write = os.pipe()
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, __file__, json.dumps(llm), str(write)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=env,
                pass_fds=[write],
                # No session of its own: it would be scheduled as a group, and ranks that spin in sched_yield starve other groups for seconds.
                process_group=0,
            )
        os.close(write)
        self._answers = os.fdopen(read, "rb", buffering=0)
        self._buffer = b""
        try:
            self._answer(START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def call(self, action: str, **arguments) -> None:
        """Starts an action; answer() gives its result."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([action, arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = CALL_TIMEOUT_S):
        return self._answer(timeout_s)

    def run(self, action: str, timeout_s: float = CALL_TIMEOUT_S, **arguments):
        self.call(action, **arguments)
        return self._answer(timeout_s)

    def generate(self, prompts: list[list[int]], count: int = 12, **options) -> list[dict]:
        """For each prompt: tokens, cached (tokens not computed), params (kv_transfer_params of the answer)."""
        return self.run("generate", prompts=prompts, count=count, **options)

    def _answer(self, timeout_s: float):
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineError(f"no answer in {timeout_s} s; {self._log_end()}")
            # poll: a run of many tests has descriptors that select does not take.
            waiting = select.poll()
            waiting.register(self._answers, select.POLLIN)
            if waiting.poll(left * 1000):
                chunk = self._answers.read(1 << 20)
                if not chunk:
                    raise EngineError(f"the engine died; {self._log_end()}")
                self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer["result"]

    def _log_end(self) -> str:
        return f"{self.log_path} ends:\n" + self.log_path.read_text(errors="replace")[-4000:]

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def close(self) -> None:
        end(self.process)
        self._answers.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def main() -> None:
    options, answers = json.loads(sys.argv[1]), os.fdopen(int(sys.argv[2]), "w")

    def say(answer: dict) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    import engine_actions
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if "kv_transfer_config" in options:
        options["kv_transfer_config"] = KVTransferConfig(**options["kv_transfer_config"])
    llm = LLM(**options)
    say({"result": None})
    for line in sys.stdin:
        action, arguments = json.loads(line)
        try:
            say({"result": getattr(engine_actions, action)(llm, **arguments)})
        except Exception as e:
            import traceback

            traceback.print_exc()
            say({"error": f"{action}: {e!r}"})
    os._exit(0)  # nothing of a test's engine is worth waiting for


if __name__ == "__main__":
    main()
