"""make demo-vllm: one prompt's KV on its way through real engines. Prints what took how long; ends with 1 if a token differs."""

import pathlib
import sys
import tempfile
import time

from api_server import ApiServer, complete
from daemon import wait_for
from nodes import TwoNodes
from prompts import prompts
from proxy import Proxy
from tiny_model import make_model

PROMPT_TOKENS = 6000
ANSWER_TOKENS = 16
# Prompt and answer must fit, and a long prompt shall be one chunk.
ARGUMENTS = ("--max-model-len", "8000", "--max-num-batched-tokens", "8000")
BLOCK_TOKENS = 128


def settle() -> None:
    """vLLM's processes spin for a second after their last step: two engines on two cores would wait for each other's."""
    time.sleep(1.5)


class Progress:
    def __init__(self) -> None:
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:5.1f} s] {text}", flush=True)


def main() -> int:
    progress = Progress()
    blocks = PROMPT_TOKENS // BLOCK_TOKENS
    # The first prompt of that length that an engine meets takes it longer; what is measured is the second.
    warm_up, prompt = (prompts(seed, count=1, length=PROMPT_TOKENS)[0] for seed in (1, 2))
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as folder:
        directory = pathlib.Path(folder)
        progress.say("make the model: a random Llama of 4 layers, float32")
        model = make_model(directory / "model")
        with TwoNodes(directory, pool="512MiB") as nodes:
            progress.say("start two engines, one on each node")
            with ApiServer(model, directory / "decode", nodes.b, *ARGUMENTS) as decode:
                with ApiServer(model, directory / "prefill", nodes.a, *ARGUMENTS) as prefill:
                    prefill.wait()
                    prefill.complete(warm_up)
                    progress.say(f"a prompt of {PROMPT_TOKENS} tokens on node a")
                    settle()
                    cold = prefill.complete(prompt, ANSWER_TOKENS)
                    wait_for(lambda: nodes.a.cli("status")["tiers"][0]["blocks"] >= 2 * blocks, 30, "the prompt is stored")
                progress.say(f"{blocks} blocks are stored; the engine on node a was killed and starts again")
                with ApiServer(model, directory / "prefill", nodes.a, *ARGUMENTS) as prefill:
                    prefill.wait()
                    decode.wait()
                    prefill.complete(warm_up)
                    decode.complete(warm_up)
                    settle()
                    loaded = prefill.complete(prompt, ANSWER_TOKENS)
                    progress.say("the same prompt again: loaded; now through the proxy: prefill on node a, decode on node b")
                    with Proxy(directory, [prefill.url], [decode.url]) as proxy:
                        settle()
                        handed_over = complete(proxy.url, prompt, ANSWER_TOKENS)
                    return report(progress, nodes, decode, cold, loaded, handed_over)


def report(progress: Progress, nodes: TwoNodes, decode: ApiServer, cold: dict, loaded: dict, handed_over: dict) -> int:
    progress.say("done\n")
    rows = [
        ("computed, node a", cold),
        ("loaded after a restart, node a", loaded),
        ("handed over, node a to node b", handed_over),
    ]
    print(f"{'':32}{'seconds':>8}  {'cached tokens':>13}  same tokens")
    for name, row in rows:
        same = "yes" if row["tokens"] == cold["tokens"] else "NO"
        print(f"{name:32}{row['seconds']:8.3f}  {row['cached']:7} of {PROMPT_TOKENS}  {same}")
    moved = decode.metrics().get("loaded_bytes_total", 0)
    print(f"\nnode b took over {moved / 2**20:.1f} MiB over TCP between {nodes.how}")
    good = all(row["tokens"] == cold["tokens"] for _, row in rows) and loaded["cached"] > 0 and handed_over["cached"] > 0
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
