"""The connector for vLLM. Installing the package is enough: vLLM finds it as a plugin.

vllm serve MODEL --kv-transfer-config '{"kv_connector":"KVFerryConnector","kv_role":"kv_both"}'
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.vllm.connector import KVFerryConnector

NAME = "KVFerryConnector"
__all__ = ["KVFerryConnector", "register"]


def register() -> None:
    """Entry point of group vllm.general_plugins; may be called more than once in a process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, "kvferry.vllm.connector", NAME)
    except ValueError:
        pass  # is registered already


def __getattr__(name: str) -> Any:
    # Not imported at the top: plugins load in every process, also where no connector is wanted.
    if name == NAME:
        from kvferry.vllm.connector import KVFerryConnector

        return KVFerryConnector
    raise AttributeError(name)
