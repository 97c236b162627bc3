"""vLLM's connector interface, on top of Scheduler and Worker. It catches whatever they raise: the engine goes on without a cache."""

import functools
import logging
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from kvferry.v1 import engine_pb2 as pb
from kvferry.vllm.config import Config, read_config, unsupported
from kvferry.vllm.meta import RankMeta, StepMeta
from kvferry.vllm.metrics import PromMetrics, Stats
from kvferry.vllm.refusal import RefusingWorker
from kvferry.wire import VERSION

logger: logging.Logger = init_logger("vllm.kvferry")


def _guarded(default: Any):
    """What goes wrong in a hook is logged once for each hook and answered with the value of default()."""

    def decorate(method):
        @functools.wraps(method)
        def hook(self, *args, **kwargs):
            if self._scheduler is None and self._worker is None:
                return default()
            try:
                return method(self, *args, **kwargs)
            except Exception:
                self._report(method.__name__)
                return default()

        return hook

    return decorate


def _nothing() -> None:
    return None


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores blocks in the node's kvferryd as they are computed, loads them back, and hands prompts to other engines."""

    _cache_hit_source = CacheHitSource.HOST
    _reported: ClassVar[set[str]] = set()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        config = read_config(transfer.kv_connector_extra_config)
        if transfer.kv_load_failure_policy != "recompute":
            # A block that does not come is no reason to fail a request. The scheduler reads this after the constructor.
            transfer.kv_load_failure_policy = "recompute"
            logger.info("kvferry: kv_load_failure_policy is recompute")
        self._scheduler: Any = None
        self._worker: Any = None
        self._bad_blocks: set[int] = set()
        reason = unsupported(vllm_config, kv_cache_config)
        if reason is not None:
            # Every process finds the same; one says it.
            self._refuse(reason, say=role == KVConnectorRole.SCHEDULER)
            return
        try:
            self._start(config, vllm_config, role, kv_cache_config)
        except (ValueError, OSError) as e:
            self._refuse(str(e), say=True)
        except Exception:
            logger.exception("kvferry: the connector does not start")
            self._scheduler = None
            self._refuse("it does not start; see the error above", say=True)

    def _refuse(self, reason: str, say: bool) -> None:
        if say:
            logger.error("kvferry: nothing is cached: %s", reason)
        if self.role == KVConnectorRole.WORKER:
            self._worker = RefusingWorker()

    def _start(self, config: Config, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        import vllm

        from kvferry.vllm.scheduler import Scheduler
        from kvferry.vllm.space import build_space
        from kvferry.vllm.worker import Worker

        ranks = vllm_config.parallel_config.world_size
        hello = pb.Hello(
            wire_version=VERSION,
            instance=self._kv_transfer_config.engine_id,
            ranks=ranks,
            space=build_space(config, vllm_config, kv_cache_config),
            engine="vllm",
            engine_version=vllm.__version__[:64],
            serving_address=config.serving_address,
            tenant=config.tenant,
            # vLLM makes it when it makes its configuration, which all of its processes get.
            engine_start=f"{vllm_config.instance_id} {self._kv_transfer_config.engine_id}"[:128],
        )
        if role == KVConnectorRole.SCHEDULER:
            hello.role = pb.ROLE_SCHEDULER
            self._scheduler = Scheduler(config, hello, ranks, kv_cache_config.num_blocks, logger)
        else:
            hello.role = pb.ROLE_WORKER
            hello.rank = vllm_config.parallel_config.rank
            self._worker = Worker(config, hello, kv_cache_config.num_blocks, logger)

    def _report(self, where: str) -> None:
        side = self._scheduler or self._worker
        side.failed(where)
        if where not in self._reported:
            self._reported.add(where)
            logger.exception("kvferry: error in %s; the engine goes on (said once)", where)

    # ---- worker side ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if not hasattr(self._worker, "register"):
            return
        try:
            self._worker.register(kv_caches)
        except (ValueError, OSError) as e:
            self._worker.close()
            self._refuse(str(e), say=True)

    @_guarded(_nothing)
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._worker.before_step(kv_connector_metadata)

    @_guarded(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    @_guarded(_nothing)
    def wait_for_save(self) -> None:
        self._worker.start_stores(self._get_connector_metadata())

    @_guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received, self._bad_blocks = self._worker.finished()
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    @_guarded(_nothing)
    def build_connector_worker_meta(self) -> RankMeta | None:
        return self._worker.take_meta()

    # ---- scheduler side ----

    @_guarded(_nothing)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.use_pool(gpu_block_pool)

    @_guarded(_nothing)
    def on_new_request(self, request: Any) -> None:
        self._scheduler.arrived(request)

    @_guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is None:
            return
        block_ids = blocks.get_block_ids()[0]
        try:
            self._scheduler.allocated(request, block_ids, num_external_tokens)
        except Exception:
            self._report("update_state_after_alloc")
            self._scheduler.unallocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMeta:
        if self._scheduler is None:
            return StepMeta("")
        try:
            return self._scheduler.step_meta(scheduler_output)
        except Exception:
            self._report("build_connector_meta")
            return self._scheduler.rescue_meta()

    @_guarded(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.step_ended(connector_output)

    @_guarded(lambda: (False, None))
    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        well = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        return self._scheduler.finished(request, block_ids[0], well)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @_guarded(lambda: False)
    def has_pending_block_frees(self) -> bool:
        return self._scheduler.frees_pending()

    @_guarded(_nothing)
    def reset_cache(self) -> bool | None:
        self._scheduler.reset()
        return True

    # ---- both ----

    @_guarded(_nothing)
    def get_kv_connector_stats(self) -> Stats | None:
        return (self._scheduler or self._worker).take_stats()

    @_guarded(_nothing)
    def shutdown(self) -> None:
        (self._scheduler or self._worker).close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats | None:
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
