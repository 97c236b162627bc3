"""A small proxy for disaggregated prefill: every completion goes to the prefill engine first, then with its parameters to the decode engine.

It carries kv_transfer_params as llm-d's sidecar does, and knows nothing of kvferry. Usage: pd_proxy.py PORT PREFILL_URL DECODE_URL
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from api_server import post

PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def handler(prefill_url: str, decode_url: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": PREFILL_PARAMS}
            first.pop("stream_options", None)
            params = post(prefill_url + self.path, first).get("kv_transfer_params")
            if params:
                # vLLM would report this number, of the prefill engine's cache, instead of what the decode engine did not compute.
                params.pop("remote_prefill_cached_tokens", None)
            answer = json.dumps(post(decode_url + self.path, {**body, "kv_transfer_params": params})).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args) -> None:
            return

    return Handler


def serve(port: int, prefill_url: str, decode_url: str) -> ThreadingHTTPServer:
    """A server for the caller to run."""
    return ThreadingHTTPServer(("127.0.0.1", port), handler(prefill_url, decode_url))


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2], sys.argv[3]).serve_forever()
