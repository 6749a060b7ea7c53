"""What every page must hold: bytes that follow from its content's id, different in every word of
every layer for any two ids, and from layer to layer and word to word."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch

from kvburst.pools import Pool

# Two odd constants: multiplying by one is a bijection of the 64-bit words.
_SEED_FACTOR = -0x61C8864680B583EB
_WORD_FACTOR = -0x4B47D0C5B4E4A0F5

# So many at a time stay in the processor's caches, and torch goes through them with one thread: on
# a busy machine, waiting for the others costs a hundred times what they save. `tensor[index]` asks
# for them all the same, `index_select` and `index_copy_` do not.
_PIECE_WORDS = 1 << 14


class PageBytes(ABC):
    """Writes pages as a forward would, and checks them."""

    @abstractmethod
    def write(self, pages: Sequence[int], contents: Sequence[int]) -> None:
        """``contents[i]`` into device page ``pages[i]``, all layers and pools."""

    @abstractmethod
    def wrong_on_device(self, pages: Sequence[int], contents: Sequence[int]) -> int:
        """How many device pages do not hold their content to the last byte."""

    @abstractmethod
    def wrong_on_host(self, pages: Sequence[int], contents: Sequence[int]) -> int:
        """The same of host pages."""


class NoBytes(PageBytes):
    """For a run that moves none: nothing is written, and nothing can be wrong."""

    def write(self, pages: Sequence[int], contents: Sequence[int]) -> None:
        pass

    def wrong_on_device(self, pages: Sequence[int], contents: Sequence[int]) -> int:
        return 0

    def wrong_on_host(self, pages: Sequence[int], contents: Sequence[int]) -> int:
        return 0


class RealBytes(PageBytes):
    """Of pools in host memory whose page bytes are a multiple of 8."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self._device: list[torch.Tensor] = []
        self._host: list[torch.Tensor] = []
        self._ramps: list[torch.Tensor] = []
        words_before = 0
        for pool in pools:
            words = pool.device.page_bytes // 8
            for position, row in enumerate(pool.host.rows):
                assert row is not None
                layer = pool.device.layers[position]
                self._device.append(layer.view(pool.device.pages, -1).view(torch.int64))
                self._host.append(pool.host.tensor[:, row].view(torch.int64))
                ramp = torch.arange(words_before + 1, words_before + words + 1)
                self._ramps.append(ramp * _WORD_FACTOR)
                words_before += words

    def write(self, pages: Sequence[int], contents: Sequence[int]) -> None:
        for index, seeds in self._pieces(pages, contents):
            for layer, ramp in zip(self._device, self._ramps, strict=True):
                layer.index_copy_(0, index, seeds + ramp)

    def wrong_on_device(self, pages: Sequence[int], contents: Sequence[int]) -> int:
        return self._wrong(self._device, pages, contents)

    def wrong_on_host(self, pages: Sequence[int], contents: Sequence[int]) -> int:
        return self._wrong(self._host, pages, contents)

    def _wrong(
        self, tier: list[torch.Tensor], pages: Sequence[int], contents: Sequence[int]
    ) -> int:
        wrong = 0
        for index, seeds in self._pieces(pages, contents):
            right = torch.ones(len(index), dtype=torch.bool)
            for layer, ramp in zip(tier, self._ramps, strict=True):
                right &= (layer.index_select(0, index) == seeds + ramp).all(dim=1)
            wrong += len(index) - int(right.sum())
        return wrong

    def _pieces(
        self, pages: Sequence[int], contents: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        index, seeds = torch.tensor(pages), _seeds(contents)
        at_once = max(1, _PIECE_WORDS // max(len(ramp) for ramp in self._ramps))
        for first in range(0, len(pages), at_once):
            yield index[first : first + at_once], seeds[first : first + at_once]


def _seeds(contents: Sequence[int]) -> torch.Tensor:
    """[contents, 1]; different for different contents: every step can be undone."""
    x = torch.tensor(contents, dtype=torch.int64)[:, None] * _SEED_FACTOR
    return (x ^ (x >> 32 & 0xFFFFFFFF)) * _SEED_FACTOR
