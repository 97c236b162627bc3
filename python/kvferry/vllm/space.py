"""Says which bytes are interchangeable: everything that, besides the tokens, decides what lies in a block."""

import fcntl
import hashlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvferry.v1 import engine_pb2 as pb
from kvferry.vllm.config import Config

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", "config.json")


def weights_digest(folder: str) -> str:
    """A digest of all of a model's local files.

    Large weights take as long as reading them, once on a node: what was read is remembered by name, size and time in the user's cache folder.
    """
    paths = [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(_WEIGHTS)]
    paths = [p for p in paths if os.path.isfile(p)]
    cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvferry")
    try:
        os.makedirs(cache, exist_ok=True)
        with open(os.path.join(cache, "digests.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of an engine start together: one reads
            digests = _digests(paths, os.path.join(cache, "digests.json"))
    except OSError:  # no place to remember them
        digests = _digests(paths, None)
    total = hashlib.sha256()
    for path, digest in zip(paths, digests):
        total.update(f"{os.path.basename(path)}\0{digest}\0".encode())
    return total.hexdigest()


def _digests(paths: list[str], memory: str | None) -> list[str]:
    known: dict[str, str] = {}
    if memory is not None:
        try:
            with open(memory) as f:
                known = json.load(f)
        except (OSError, ValueError):
            pass
    keys = []
    for path in paths:
        stat = os.stat(path)
        keys.append(f"{os.path.realpath(path)} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}")
    missing = [(key, path) for key, path in zip(keys, paths) if key not in known]
    with ThreadPoolExecutor(4) as pool:  # hashing gives the interpreter's lock away
        known.update(zip([key for key, _ in missing], pool.map(_file_digest, [path for _, path in missing])))
    if missing and memory is not None:
        with open(memory + ".new", "w") as f:
            json.dump(dict(list(known.items())[-4096:]), f)
        os.replace(memory + ".new", memory)
    return [known[key] for key in keys]


def _file_digest(path: str) -> str:
    digest, buffer = hashlib.sha256(), bytearray(1 << 20)
    with open(path, "rb", buffering=0) as f:
        while n := f.readinto(buffer):
            digest.update(memoryview(buffer)[:n])
    return digest.hexdigest()


def _revision(model_config: Any) -> str:
    """Commit of a model from the hub, digest of a local one. Raises ValueError where neither is found."""
    if os.path.isdir(model_config.model):
        return "digest:" + weights_digest(model_config.model)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model_config.model, "config.json", revision=model_config.revision)
    if not isinstance(config, str):
        raise ValueError(f"no revision of {model_config.model} found: set kv_connector_extra_config.revision")
    return "commit:" + os.path.basename(os.path.dirname(config))


def _computation(model_config: Any) -> str:
    """A digest of what changes the numbers besides the weights: type, quantization, overrides such as RoPE scaling."""
    described = {k: v for k, v in model_config.hf_text_config.to_dict().items() if not k.startswith("_") and k != "transformers_version"}
    text = json.dumps(
        [described, str(model_config.dtype), model_config.quantization, str(getattr(model_config, "load_format", ""))],
        sort_keys=True,
        default=str,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _layout(vllm_config: Any, spec: Any) -> str:
    """Backend and instruction set decide how bytes lie inside a block on a CPU."""
    import vllm
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(spec.dtype, spec.block_size, spec.head_size)
    return f"vllm-{vllm.__version__}/cpu_attn/{isa}/page{spec.page_size_bytes}"


def build_space(config: Config, vllm_config: Any, kv_cache_config: Any) -> pb.Space:
    """The space of this engine's only KV group, equal in all its processes. Raises ValueError for what cannot be named."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    algorithm = cache.prefix_caching_hash_algo
    if algorithm in ("sha256", "xxhash"):
        # These hash a pickle, whose bytes may change with Python.
        algorithm += "/python%d.%d" % sys.version_info[:2]
    return pb.Space(
        model=config.model or (os.path.basename(os.path.abspath(model.model)) if os.path.isdir(model.model) else model.model),
        revision=f"{config.revision or _revision(model)} computation:{_computation(model)}",
        kv_dtype=str(spec.dtype).removeprefix("torch."),
        block_tokens=spec.block_size,
        group=0,
        attention="full",
        layers=len(group.layer_names),
        heads=model.get_total_num_kv_heads(),
        head_size=spec.head_size,
        layout=_layout(vllm_config, spec),
        tp=parallel.tensor_parallel_size,
        pp=1,
        dcp=1,
        shard_kind=pb.SHARD_KIND_SHARDED,
        hash_algorithm=algorithm,
        hash_seed=os.environ.get("PYTHONHASHSEED") or "vllm-none-hash",
    )
