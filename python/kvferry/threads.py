"""Threads of the connector inside an engine's process."""

import os
import threading
from collections.abc import Callable


def start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    """Starts a daemon thread that may run on every CPU that the engine was given.

    Engines bind the thread that computes to a core, and what it starts inherits that: our work would take turns with the forward pass on
    one core while others idle. The parent process still has the CPUs that the engine was given.
    """

    def run() -> None:
        try:
            os.sched_setaffinity(0, os.sched_getaffinity(0) | os.sched_getaffinity(os.getppid()))
        except OSError:
            pass  # then it stays where it is
        target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
