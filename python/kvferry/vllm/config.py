"""What a user may set in kv_connector_extra_config, and what is served at all."""

import os
import shutil
import sysconfig
from dataclasses import dataclass, fields
from typing import Any, Literal

DEFAULT_SOCKET = "/run/kvferry/engine.sock"


@dataclass(frozen=True)
class Config:
    socket: str = ""  # of the Engine service; KVFERRY_SOCKET, then DEFAULT_SOCKET
    descriptors: str = ""  # of the descriptor socket; descriptors.sock beside the other
    mode: Literal["lent", "staging"] = "lent"
    staging_bytes: int = 256 << 20  # of the staging buffer
    store: Literal["eager", "idle"] = "eager"  # blocks as they are computed, or what nobody used for hbm_idle_s
    hbm_idle_s: int = 15
    hbm_give_back: bool = False  # of idle blocks, once they are stored
    direct: Literal["auto", "on", "off"] = "auto"  # lend blocks that peers' transfers write; on: and say where the daemon does not
    model: str = ""  # name in the space, where the engine's would differ between nodes
    revision: str = ""  # or digest of the weights, where it cannot be found or takes too long to compute
    tenant: str = ""  # default tenant of this engine's requests
    serving_address: str = ""  # host:port that the router sends requests to
    match_wait_ms: int = 20  # a request waits so long for the daemon's answer, then it is computed
    match_timeout_ms: int = 1000
    lease_ms: int = 0  # of what Match found; 0 is the daemon's default
    load_timeout_ms: int = 5000  # then the blocks are computed
    transfer_timeout_ms: int = 30000  # the same where the prompt is still being computed elsewhere
    store_timeout_ms: int = 10000
    hold_ms: int = 2000  # blocks of a handed-over request are kept so long for their stores
    spill_ms: int = 5000  # blocks of a handed-over request are lent so long, then they are had from the pool only
    spill_percent: int = 20  # of the KV memory; where lent blocks are more, the oldest go first
    offer_lifetime_ms: int = 0  # 0 is the daemon's default
    copy_threads: int = 2  # for copies of 16 MiB and more; 1 or 2


def read_config(extra: dict[str, Any]) -> Config:
    """Raises ValueError that names the key which is unknown or has a wrong value."""
    known = {f.name: f for f in fields(Config)}
    for key, value in extra.items():
        if key not in known:
            raise ValueError(f"kv_connector_extra_config.{key}: unknown; known are {', '.join(known)}")
        default = getattr(Config, key)
        if type(value) is not type(default) or (isinstance(value, int) and value < 0):
            raise ValueError(f"kv_connector_extra_config.{key}: {value!r} is no {type(default).__name__}, or negative")
    config = Config(**extra)
    if config.mode not in ("lent", "staging"):
        raise ValueError(f"kv_connector_extra_config.mode: {config.mode!r} is neither lent nor staging")
    if config.direct not in ("auto", "on", "off"):
        raise ValueError(f"kv_connector_extra_config.direct: {config.direct!r} is none of auto, on, off")
    if config.store not in ("eager", "idle"):
        raise ValueError(f"kv_connector_extra_config.store: {config.store!r} is neither eager nor idle")
    if config.store == "idle" and config.mode != "lent":
        raise ValueError("kv_connector_extra_config.store: idle needs mode lent: idle blocks are read where they lie")
    if config.hbm_give_back and config.store != "idle":
        raise ValueError("kv_connector_extra_config.hbm_give_back: needs store idle")
    timeouts = [(f"{name}_timeout_ms", 1, 60000) for name in ("load", "transfer", "store")]
    for key, low, high in (*timeouts, ("spill_percent", 0, 100), ("hbm_idle_s", 0, 86400), ("copy_threads", 1, 2)):
        if not low <= getattr(config, key) <= high:
            raise ValueError(f"kv_connector_extra_config.{key}: {getattr(config, key)} is not in {low}..{high}")
    socket = config.socket or os.environ.get("KVFERRY_SOCKET", "") or DEFAULT_SOCKET
    descriptors = config.descriptors or os.path.join(os.path.dirname(socket), "descriptors.sock")
    return Config(**{**extra, "socket": socket, "descriptors": descriptors})


def missing_helper() -> str | None:
    """Why the C helper cannot be used, or None."""
    try:
        import kvferry._native  # noqa: F401
    except ImportError as e:
        compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
        if shutil.which(compiler) is None:
            return f"the C helper was not built because there is no compiler {compiler!r}: install it, then reinstall kvferry"
        return f"the C helper cannot be loaded ({e}): reinstall kvferry"
    return None


def unsupported(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why this engine's KV cannot be served, for people, or None."""
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    parallel = vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if not current_platform.is_cpu():
        return f"KV memory on {current_platform.device_type} is not supported so far; host memory (the CPU back end) is"
    if len(groups) != 1:
        return f"the model has {len(groups)} KV groups; one is supported so far"
    spec = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        return f"attention of kind {type(spec).__name__} is not supported so far; FullAttentionSpec is"
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        return "attention with a window is not supported so far"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism is not supported so far"
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "context parallelism is not supported so far"
    if getattr(parallel, "nnodes", 1) > 1:
        return "an engine on several nodes is not supported so far"
    if algorithm.startswith("xxhash") and not os.environ.get("PYTHONHASHSEED"):
        return f"--prefix-caching-hash-algo {algorithm} gives other hashes in every process: use sha256_cbor, or set PYTHONHASHSEED"
    return missing_helper()
