"""Connects inference engines to kvferryd, the daemon that keeps and moves their KV cache.

kvferry.vllm is the connector for vLLM, kvferry.session the protocol that a connector of another engine would use. Nothing here raises
into the engine or makes it wait: whatever goes wrong is "not cached", counted with its reason.
"""

__version__ = "0.1.0"
