"""Small traces in Mooncake's format, made up here."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvburst.replay.burst_log import BurstLog
from kvburst.replay.movers import PlanMover
from kvburst.replay.options import ReplayOptions
from kvburst.replay.page_bytes import NoBytes
from kvburst.replay.prefix_cache import PrefixCache
from kvburst.replay.server import Server
from kvburst.replay.tiers import TierSizes, absent_layouts, geometry_of
from kvburst.replay.trace import BLOCK_TOKENS, Request

PAGE = 64


def line(hash_ids: list[int], last: int = BLOCK_TOKENS, output: int = 64) -> dict[str, Any]:
    """A request whose last block holds `last` tokens."""
    return {
        "timestamp": 0,
        "input_length": (len(hash_ids) - 1) * BLOCK_TOKENS + last,
        "output_length": output,
        "hash_ids": hash_ids,
    }


def write_trace(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def conversations(seed: int, requests: int, most_blocks: int = 4) -> list[dict[str, Any]]:
    """Turns of several conversations behind one system prompt: each turn has the blocks of the one
    before it and new ones; some end in the middle of a block, and some are asked twice."""
    rng = random.Random(seed)
    fresh = iter(range(1, 1_000_000))
    histories: list[list[int]] = [[0] for _ in range(6)]
    lines = []
    for _ in range(requests):
        chosen = rng.randrange(len(histories))
        if len(histories[chosen]) >= most_blocks:
            histories[chosen] = [0]
        history = histories[chosen]
        history += [next(fresh) for _ in range(rng.randint(0, 2))]
        ended = rng.random() < 0.5
        hash_ids = [*history, next(fresh)] if ended else list(history)
        last = rng.randint(1, BLOCK_TOKENS - 1) if ended else BLOCK_TOKENS
        lines.append(line(hash_ids, last, rng.choice([0, 1, 63, 64, 65, 300])))
    return lines


def request(hash_ids: list[int], last: int = BLOCK_TOKENS, output: int = 64) -> Request:
    fields = line(hash_ids, last, output)
    return Request(1, 0.0, fields["input_length"], output, tuple(hash_ids))


class Planned:
    """A server that moves no bytes, with all its parts."""

    def __init__(
        self, requests: Iterable[Request], device_pages: int = 64, host_pages: int = 256
    ) -> None:
        sizes = TierSizes(device_pages, host_pages, PAGE)
        shape = geometry_of(ReplayOptions(Path("unused")))
        self.sizes = sizes
        self.log = BurstLog(absent_layouts(shape, sizes))
        self.mover = PlanMover(sizes, self.log)
        self.cache = PrefixCache(self.mover)
        self.server = Server(list(requests), self.cache, self.mover, NoBytes(), PAGE)

    def run(self) -> "Planned":
        while not self.server.done:
            self.server.step()
        self.server.finish()
        return self

    def bursts(self, direction: str) -> list[tuple[list[int], list[int]]]:
        return [
            (list(each.device), list(each.host))
            for each in self.log.records
            if each.direction == direction
        ]
