"""kv_connector_extra_config."""

import pytest

from kvferry.vllm.config import DEFAULT_SOCKET, missing_helper, read_config


def test_defaults(monkeypatch):
    monkeypatch.delenv("KVFERRY_SOCKET", raising=False)
    config = read_config({})
    assert config.socket == DEFAULT_SOCKET and config.descriptors == "/run/kvferry/descriptors.sock" and config.mode == "lent"
    assert config.direct == "auto" and config.spill_ms == 5000 and config.spill_percent == 20
    monkeypatch.setenv("KVFERRY_SOCKET", "/tmp/x/engine.sock")
    assert read_config({}).descriptors == "/tmp/x/descriptors.sock"
    assert read_config({"socket": "/y/e", "descriptors": "/z"}).descriptors == "/z"


@pytest.mark.parametrize(
    "extra",
    [
        {"sokcet": "/x"},
        {"mode": "borrowed"},
        {"match_wait_ms": "20"},
        {"match_wait_ms": -1},
        {"load_timeout_ms": 0},
        {"copy_threads": 3},
        {"direct": "maybe"},
        {"spill_percent": 101},
        {"transfer_timeout_ms": 60001},
        {"store": "lazy"},
        {"hbm_idle_s": 86401},
        {"hbm_idle_s": 0.5},
        {"hbm_give_back": 1},
        {"hbm_give_back": True},
    ],
)
def test_wrong_keys_are_named(extra):
    (key,) = extra
    with pytest.raises(ValueError, match=f"kv_connector_extra_config.{key}"):
        read_config(extra)


def test_idle_mode():
    config = read_config({"store": "idle", "hbm_give_back": True})
    assert config.hbm_idle_s == 15 and config.hbm_give_back and read_config({}).store == "eager"
    with pytest.raises(ValueError, match="store: idle needs mode lent"):
        read_config({"store": "idle", "mode": "staging"})


def test_helper_is_there():
    assert missing_helper() is None
