"""Prompts of random tokens, the same for the same seed."""

import random

from tiny_model import TOKENS


def prompts(seed: int, count: int = 3, length: int = 1000) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.choice(TOKENS) for _ in range(length + 13 * i)] for i in range(count)]


def sharing_prompts(seed: int, count: int, shared: int, own: int) -> list[list[int]]:
    rng = random.Random(seed)
    prefix = [rng.choice(TOKENS) for _ in range(shared)]
    return [prefix + [rng.choice(TOKENS) for _ in range(own)] for _ in range(count)]


def tokens(outputs: list[dict]) -> list[list[int]]:
    return [o["tokens"] for o in outputs]


def cached(outputs: list[dict]) -> list[int]:
    return [o["cached"] for o in outputs]
