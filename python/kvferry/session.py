"""Keeps one process attached to the daemon: connects, hands its memory over, and begins anew when the daemon was gone.

A Session owns one thread. Nobody else ever waits for the daemon: users take `session.attachment`, which is None while there is none, and
get every result through callbacks or from the operations' words.
"""

import logging
import os
import queue
import random
import threading
from collections.abc import Callable

import grpc

from kvferry import wire
from kvferry.attachment import Attachment
from kvferry.memory import exchange_descriptors
from kvferry.threads import start_thread
from kvferry.v1 import engine_pb2 as pb
from kvferry.v1 import engine_pb2_grpc

ATTACH_TIMEOUT_S = 10.0
BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 2.0

_CHANNEL_OPTIONS = [
    # The name of a unix socket is no host name, and servers refuse it as one.
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
]


class Session:
    """hello describes this process; its space may be changed later with use_space. given: region id or descriptor entry -> descriptor of a memfd.

    on_attached(attachment) is called on the session's thread each time that a daemon took the process in, on_message(attachment, message)
    for what the daemon tells by itself (OfferServed, LentGone).
    """

    def __init__(
        self,
        socket_path: str,
        descriptor_path: str,
        hello: pb.Hello,
        given: dict[int, int],
        log: logging.Logger,
        on_attached: Callable[[Attachment], None] | None = None,
        on_message: Callable[[Attachment, pb.SessionResponse], None] | None = None,
    ):
        self._socket_path = socket_path
        self._descriptor_path = descriptor_path
        self._hello = hello
        self._given = given
        self._log = log
        self._on_attached = on_attached
        self._on_message = on_message
        self._lock = threading.Lock()  # guards _hello.space, _sequence, _call
        self._sequence = 0
        self._call: grpc.Call | None = None
        self._closed = threading.Event()
        self._complaint = ""  # why there is no attachment, as it was last said
        self.attachment: Attachment | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = start_thread("kvferry-session", self._run)

    def close(self, timeout_s: float = 2.0) -> None:
        self._closed.set()
        with self._lock:
            call = self._call
        if call is not None:
            call.cancel()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def space_id(self, weights_generation: str) -> tuple[Attachment, bytes] | None:
        """The attachment and the id of the space of this weights generation; None while the daemon has not told it."""
        attachment = self.attachment
        if attachment is None or attachment.lost:
            return None
        space_id = attachment.spaces.get(weights_generation)
        return None if space_id is None else (attachment, space_id)

    def use_space(self, space: pb.Space) -> None:
        """From now on the process works in this space; its id comes when the daemon has answered."""
        with self._lock:
            self._hello.space.CopyFrom(space)
            self._sequence += 1
            attachment = self.attachment
            if attachment is not None:
                attachment.send(pb.SessionRequest(use_space=pb.UseSpace(sequence=self._sequence, space=space)))

    def _run(self) -> None:
        backoff_s = BACKOFF_MIN_S
        while not self._closed.is_set():
            reason = "no socket"
            if os.path.exists(self._socket_path):
                attached, reason = self._serve()
                if attached:
                    backoff_s = BACKOFF_MIN_S
            if self._closed.is_set():
                return
            if reason != self._complaint:
                self._complaint = reason
                self._log.warning("kvferry: not attached to a daemon at %s: %s; nothing is cached until then", self._socket_path, reason)
            self._closed.wait(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    def _serve(self) -> tuple[bool, str]:
        """One connection, from Hello to its end. Tells whether it was attached, and why it ended."""
        outgoing: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        attachment = None
        try:
            with grpc.insecure_channel("unix:" + self._socket_path, _CHANNEL_OPTIONS) as channel:
                stub = engine_pb2_grpc.EngineStub(channel)
                call = stub.Session(iter(outgoing.get, None))
                with self._lock:
                    self._call = call
                    hello = pb.Hello()
                    hello.CopyFrom(self._hello)
                guard = threading.Timer(ATTACH_TIMEOUT_S, call.cancel)
                guard.daemon = True
                guard.start()
                try:
                    outgoing.put(pb.SessionRequest(hello=hello))
                    for message in call:
                        kind = message.WhichOneof("message")
                        if kind == "welcome":
                            if message.welcome.wire_version != wire.VERSION:
                                return False, f"the daemon speaks version {message.welcome.wire_version}, want {wire.VERSION}"
                            attachment = Attachment(message.welcome, stub.Match, outgoing)
                            attachment.spaces[hello.space.weights_generation] = message.welcome.space_id
                            attachment.map(exchange_descriptors(self._descriptor_path, message.welcome.token, self._given))
                        elif attachment is None:
                            return False, f"the daemon said {kind} before welcome"
                        elif kind == "attached":
                            guard.cancel()
                            self._attach(attachment, hello.space.weights_generation)
                        elif kind == "space_ready":
                            self._space_ready(attachment, message.space_ready)
                        elif kind in ("offer_served", "lent_gone"):
                            if self._on_message is not None:
                                self._on_message(attachment, message)
                        else:
                            refusal = attachment.receive(message)
                            if refusal is not None:
                                self._log.warning("kvferry: the daemon refused %s", refusal)
                    return self.attachment is attachment, "the daemon closed the session"
                finally:
                    guard.cancel()
                    call.cancel()
        except grpc.RpcError as e:
            return self.attachment is not None, f"{e.code().name}: {e.details()}"
        except (OSError, ValueError, wire.WireError) as e:
            return self.attachment is not None, str(e)
        finally:
            outgoing.put(None)
            with self._lock:
                self._call = None
                self.attachment = None
            if attachment is not None:
                attachment.lose("the daemon is gone")

    def _attach(self, attachment: Attachment, generation: str) -> None:
        if self._hello.regions and (attachment.pool is None or attachment.words is None):
            raise wire.WireError("the daemon handed out no pool or no operation words")
        self._log.info("kvferry: attached to kvferryd %s, pool of %d MiB", attachment.welcome.version, attachment.welcome.pool_bytes >> 20)
        self._complaint = ""
        with self._lock:
            self.attachment = attachment
            space = self._hello.space
            if space.weights_generation != generation:
                self._sequence += 1
                attachment.send(pb.SessionRequest(use_space=pb.UseSpace(sequence=self._sequence, space=space)))
        if self._on_attached is not None:
            self._on_attached(attachment)

    def _space_ready(self, attachment: Attachment, ready: pb.SpaceReady) -> None:
        with self._lock:
            if ready.sequence == self._sequence:
                attachment.spaces = {self._hello.space.weights_generation: ready.space_id}
