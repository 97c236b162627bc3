"""Says which bytes are interchangeable: everything that, besides the tokens, decides what lies in a block."""

import hashlib
import json
import os
import struct
import sys
from typing import Any

from kvferry.v1 import engine_pb2 as pb
from kvferry.vllm.config import Config

# Of each tensor's ends so much goes into the digest of local weights: enough to tell any two trainings apart, and read in a moment.
_TENSOR_SAMPLE = 4096


def weights_digest(folder: str) -> str:
    """A digest of a model's local files: header and both ends of every tensor for safetensors, the whole for the rest."""
    total = hashlib.sha256()
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if not os.path.isfile(path) or not name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf", "config.json")):
            continue
        total.update(f"{name}\0{os.path.getsize(path)}\0".encode())
        with open(path, "rb") as f:
            if name.endswith(".safetensors"):
                _digest_tensors(f, total)
            else:
                while chunk := f.read(1 << 20):
                    total.update(chunk)
    return total.hexdigest()


def _digest_tensors(f: Any, total: Any) -> None:
    (length,) = struct.unpack("<Q", f.read(8))
    header = f.read(length)
    total.update(header)
    for name, tensor in sorted(json.loads(header).items()):
        if name == "__metadata__":
            continue
        first, last = tensor["data_offsets"]
        for offset in (first, max(first, last - _TENSOR_SAMPLE)):
            f.seek(8 + length + offset)
            total.update(f.read(min(_TENSOR_SAMPLE, last - first)))


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
