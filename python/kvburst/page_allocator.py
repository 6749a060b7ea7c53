"""Pages of one tier, as the token slots that a cache controller deals in."""

import torch

from kvburst import _core
from kvburst._indices import index_view


class PageAllocator(_core.PageAllocator):
    """Hands out whole pages of one tier, and takes them back late.

    Deals in slots, as SGLang's allocators do: page `p` is the slots `p * page_size` to
    `(p + 1) * page_size - 1`. A page that a burst still uses may be freed, but is not handed out
    again before the burst's ack is retired. The same calls in the same order give the same pages.

    `order`: freed pages join the free list at its front ("lifo", as in SGLang's device tier) or at
    its end ("fifo", as in its host tier). Not thread-safe: belongs to the scheduler thread.
    """

    @property
    def size(self) -> int:
        """Slots in all."""
        return self.pages * self.page_size

    def available_size(self) -> int:
        """Slots that `alloc` could hand out now."""
        return self.available_pages * self.page_size

    def alloc(self, slots: int) -> torch.Tensor | None:
        """The slots of `slots / page_size` pages (int64, on the CPU), or None if there are fewer.

        The tensor is the caller's. Raises PageError if `slots` is not a multiple of the page size.
        """
        out = torch.empty(min(max(slots, 0), self.size), dtype=torch.int64)
        return out if self.allocate(slots, out.data_ptr()) else None

    def undo_alloc(self, indices: torch.Tensor) -> None:
        """Undo the last `alloc`, of which nothing has come: the next one returns the same pages."""
        self.take_back(indices.numel(), indices.data_ptr())

    def free(self, indices: torch.Tensor) -> None:
        """Take back whole pages, given by their slots in order; all of them or none.

        Raises PageError on a page that is not allocated, is given twice, or does not exist.
        """
        self.free_slots(index_view("indices", indices))

    def clear(self) -> None:
        """Everything is free again. Bursts must be drained first."""
        self.reset()
