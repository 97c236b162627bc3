"""Matches hashes from Python as the connector does, and prints how many blocks matched and how long each call took.

Arguments: sockets directory, space (JSON), number of calls. The packed hashes come on standard input.
"""

import json
import logging
import os
import sys
import threading
import time

from google.protobuf import json_format

from kvferry.session import Session
from kvferry.v1 import engine_pb2 as pb


def main() -> None:
    sockets, space, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
    hashes = sys.stdin.buffer.read()
    hello = pb.Hello(wire_version=1, role=pb.ROLE_SCHEDULER, instance="bench-python", ranks=1, engine="bench", engine_version="1")
    json_format.Parse(space, hello.space)
    attached = threading.Event()
    session = Session(
        os.path.join(sockets, "engine.sock"),
        os.path.join(sockets, "descriptors.sock"),
        hello,
        {},
        logging.getLogger("bench"),
        lambda _attachment: attached.set(),
    )
    session.start()
    if not attached.wait(10):
        sys.exit("not attached within 10 s")
    attachment = session.attachment
    assert attachment is not None
    space_id = attachment.welcome.space_id
    took, blocks = [], 0
    for _ in range(times):
        start = time.perf_counter_ns()
        blocks = attachment.match(space_id, "bench-python", hashes, 10_000, 5.0).result().blocks
        took.append(time.perf_counter_ns() - start)
    session.close()
    json.dump({"blocks": blocks, "took_ns": took}, sys.stdout)


main()
