"""What a rank answers that cannot serve."""

from collections import Counter

from kvferry.vllm.meta import RankMeta, StepMeta
from kvferry.vllm.metrics import Stats


class RefusingWorker:
    """Stands in where a rank cannot serve: the scheduler side, which may not know it, must still hear of every end."""

    def __init__(self) -> None:
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._bad: set[int] = set()
        self._ended: Counter[int] = Counter()

    def before_step(self, meta: StepMeta) -> None:
        self._sent.update(meta.holds)

    def start_loads(self, meta: StepMeta) -> None:
        for job in meta.loads:
            self._received.add(job.request_id)
            self._bad.update(job.block_ids)

    def start_stores(self, meta: StepMeta) -> None:
        self._ended.update(job.store_id for job in meta.stores)

    def finished(self) -> tuple[set[str], set[str], set[int]]:
        answer = self._sent, self._received, self._bad
        self._sent, self._received, self._bad = set(), set(), set()
        return answer

    def take_meta(self) -> RankMeta:
        ended, self._ended = self._ended, Counter()
        return RankMeta(ended, refuses=True)

    def take_stats(self) -> Stats | None:
        return None

    def failed(self, where: str) -> None:
        return

    def close(self) -> None:
        return
