"""How long this engine takes to compute a block."""

import time
from collections.abc import Callable

# Steps that compute less of prompts say more about decoding.
PROMPT_TOKENS_MIN = 256
_WEIGHT = 0.25


class Pace:
    """Measured from a step's metadata to its output, one step at a time: engines on CPUs do not schedule ahead."""

    def __init__(self, block_tokens: int, clock: Callable[[], float] = time.monotonic):
        self._block_tokens = block_tokens
        self._clock = clock
        self._began: float | None = None
        self._tokens = 0
        self._block_s = 0.0

    def step_begins(self, prompt_tokens: int) -> None:
        self._began, self._tokens = self._clock(), prompt_tokens

    def step_ended(self) -> None:
        began, self._began = self._began, None
        if began is None or self._tokens < PROMPT_TOKENS_MIN:
            return
        block_s = (self._clock() - began) / self._tokens * self._block_tokens
        self._block_s = block_s if self._block_s == 0 else self._block_s + _WEIGHT * (block_s - self._block_s)

    @property
    def block_us(self) -> int:
        """0 until it is known."""
        return min(int(self._block_s * 1e6), 2**32 - 1)
