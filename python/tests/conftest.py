"""What the tests with the real engine share: the tiny model, daemons, engines. Nothing here waits without a deadline."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    from tiny_model import make_model

    return make_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def reference(model, tmp_path_factory):
    """Tokens that an engine without kvferry gives for prompts: reference(prompts, tokens)."""
    from engine import Engine

    known: dict[str, list[list[int]]] = {}
    engine = None

    def tokens(prompts: list[list[int]], count: int = 12, **options) -> list[list[int]]:
        nonlocal engine
        key = repr((prompts, count, options))
        if key not in known:
            if engine is None:
                engine = Engine(model, tmp_path_factory.mktemp("reference"), connector=None)
            known[key] = [o["tokens"] for o in engine.generate(prompts, count, **options)]
            engine.run("reset")
        return known[key]

    yield tokens
    if engine is not None:
        engine.close()


@pytest.fixture
def daemon(tmp_path):
    from daemon import Daemon

    with Daemon(tmp_path / "node") as d:
        yield d


@pytest.fixture
def fake(tmp_path_factory):
    from fake_daemon import BLOCK_BYTES, FakeDaemon

    d = FakeDaemon(tmp_path_factory.mktemp("d"), slot_bytes=BLOCK_BYTES).start()
    yield d
    d.close()
