"""A server's scheduler, as far as it decides which pages are taken, given back and moved.

A step is one forward: first a chunk of prefill, for one request or several, then a token for each
request that decodes. Requests start in the order of the trace, as soon as their pages can be had
without taking any from a request that runs; the server is never idle. While no further request can
start, decode goes on until one has finished.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from kvburst.replay.contents import leading_pages_seen, page_contents
from kvburst.replay.movers import Mover
from kvburst.replay.page_bytes import PageBytes
from kvburst.replay.prefix_cache import Claim, Match, PrefixCache
from kvburst.replay.trace import Request

# How many of the pages do not hold these contents.
Wrong: TypeAlias = Callable[[Sequence[int], Sequence[int]], int]

CHUNK_TOKENS = 8192
"""Of prefill in one step: SGLang's default chunked_prefill_size on large devices."""


@dataclass(frozen=True)
class ServerCounts:
    """What has been served. Requests count as ``requests`` once they have finished; tokens are of
    the inputs of requests that have started: found on the device, found on the host, or prefilled.
    ``tokens_prefilled_again`` of these belong to blocks that an earlier request had brought.
    ``pages_checked`` were compared byte by byte, ``mismatched_pages`` of them were wrong."""

    requests: int = 0
    started: int = 0
    requests_hit_on_device: int = 0
    requests_hit_on_host: int = 0
    tokens_hit_on_device: int = 0
    tokens_hit_on_host: int = 0
    tokens_prefilled: int = 0
    tokens_prefilled_again: int = 0
    pages_checked: int = 0
    mismatched_pages: int = 0


@dataclass(eq=False)
class _Running:
    """A request that has started. ``pages`` are its device pages so far, of which the last may be
    partly filled; ``tokens`` have their KV in place."""

    request: Request
    contents: list[int]
    claim: Claim
    pages: list[int]
    tokens: int

    @property
    def prompt_left(self) -> int:
        return self.request.input_length - self.tokens

    @property
    def left(self) -> int:
        return self.request.tokens - self.tokens


@dataclass
class _Step:
    """What one step has started."""

    chunks: list[tuple[_Running, int]] = field(default_factory=list)
    started: list[_Running] = field(default_factory=list)


class Server:
    """Serves requests over a cache and its mover; `step` until `done`, then `finish`. Of one
    thread. Each request must fit into the device's pages."""

    def __init__(
        self,
        requests: Sequence[Request],
        cache: PrefixCache,
        mover: Mover,
        page_bytes: PageBytes,
        page_size: int,
    ) -> None:
        self.counts = ServerCounts()
        self.mismatches: list[str] = []
        self._cache = cache
        self._mover = mover
        self._bytes = page_bytes
        self._page_size = page_size
        self._waiting = deque(requests)
        self._running: list[_Running] = []
        self._seen: set[int] = set()

    @property
    def done(self) -> bool:
        return not self._waiting and not self._running

    def step(self) -> None:
        """One forward, and what the scheduler does around it."""
        self._finish_backups()
        step = _Step()
        self._continue(step)
        self._start(step)
        self._mover.start_loading()
        self._prefill(step)
        self._mover.finish_loads()
        for running in step.started:
            where = f"line {running.request.line}: its cached prefix"
            cached = running.claim.pages
            self._check(where, self._bytes.wrong_on_device, cached, running.contents[: len(cached)])
        for running, _ in step.chunks:
            self._keep(running)
        self._decode(once=bool(step.chunks))
        self._cache.back_up()

    def finish(self) -> None:
        """Waits for the last backups, then checks all that the cache holds, on both tiers."""
        self._finish_backups()
        for node in self._cache.nodes():
            if node.device is not None:
                wrong = self._bytes.wrong_on_device
                self._check("device, at the end", wrong, node.device, node.contents)
            if node.host is not None:
                self._check("host, at the end", self._bytes.wrong_on_host, node.host, node.contents)

    # --- the parts of a step -------------------------------------------------------------

    def _finish_backups(self) -> None:
        self._mover.finish_backups()
        self._cache.finish_backups()

    def _continue(self, step: _Step) -> None:
        """The next chunk of a prompt that did not fit into the last one: there is at most one."""
        for running in self._running:
            if running.prompt_left > 0:
                step.chunks.append((running, min(running.prompt_left, CHUNK_TOKENS)))

    def _start(self, step: _Step) -> None:
        """As many waiting requests as there is room for, in this chunk and on the device."""
        budget = CHUNK_TOKENS - sum(tokens for _, tokens in step.chunks)
        while self._waiting and budget >= self._page_size:
            running = self._try_start(self._waiting[0])
            if running is None:
                return
            self._waiting.popleft()
            self._running.append(running)
            step.started.append(running)
            # A chunk that is not the prompt's last ends with a page.
            whole = budget // self._page_size * self._page_size
            chunk = min(running.prompt_left, whole)
            step.chunks.append((running, chunk))
            budget -= chunk

    def _try_start(self, request: Request) -> _Running | None:
        contents = page_contents(request, self.counts.started, self._page_size)
        # The last token of a prompt is computed even if it is cached: its output is needed.
        match = self._cache.match(contents[: (request.input_length - 1) // self._page_size])
        cached = match.device_pages + match.host_pages
        reserved = sum(self._pages_of(each.request) - len(each.pages) for each in self._running)
        room = self._mover.free_device_pages + self._cache.evictable_pages - match.evictable_pages
        if self._pages_of(request) - match.device_pages + reserved > room:
            assert self._running, f"line {request.line}: does not fit into an idle server"
            return None
        claim = self._cache.claim(match)
        self._count_start(request, match)
        return _Running(request, contents, claim, claim.pages, cached * self._page_size)

    def _prefill(self, step: _Step) -> None:
        self._extend(
            [
                (running, -(-(running.tokens + chunk) // self._page_size) - len(running.pages))
                for running, chunk in step.chunks
            ]
        )
        pages: list[int] = []
        contents: list[int] = []
        for running, chunk in step.chunks:
            first = running.tokens // self._page_size
            running.tokens += chunk
            whole = running.tokens // self._page_size
            pages += running.pages[first:whole]
            contents += running.contents[first:whole]
        self._write(pages, contents)

    def _extend(self, wanted: Sequence[tuple[_Running, int]]) -> None:
        """New pages for several requests, taken together and dealt out in their order."""
        total = sum(pages for _, pages in wanted)
        self._cache.make_room(total)
        taken = self._mover.take_device(total)
        at = 0
        for running, pages in wanted:
            running.pages = running.pages + taken[at : at + pages]
            at += pages

    def _keep(self, running: _Running) -> None:
        """The cache takes over the whole pages that the request has so far."""
        whole = running.tokens // self._page_size
        running.claim = self._cache.insert(
            running.claim, running.contents[:whole], running.pages[:whole]
        )
        running.pages = running.claim.pages + running.pages[whole:]

    def _decode(self, *, once: bool) -> None:
        """One token for every request that has its prompt, or as many as it takes until one of
        them is done."""
        self._finish_requests()
        finished = False
        while not finished:
            decoding = [running for running in self._running if running.prompt_left <= 0]
            if not decoding:
                return
            self._advance(decoding, most=1 if once else self._page_size)
            finished = self._finish_requests() or once

    def _advance(self, decoding: Sequence[_Running], most: int) -> None:
        """Up to ``most`` tokens for each, but no more than until one of them needs a page or is
        done: pages are taken in the order in which the tokens come, which interleaves them."""
        full = [each for each in decoding if each.tokens == len(each.pages) * self._page_size]
        self._extend([(running, 1) for running in full])
        tokens = min(
            min(running.left, len(running.pages) * self._page_size - running.tokens)
            for running in decoding
        )
        for running in decoding:
            running.tokens += min(tokens, most)

    def _finish_requests(self) -> bool:
        """Gives back what finished requests hold; whether there were any."""
        finished = [running for running in self._running if running.left == 0]
        for running in finished:
            first = running.request.input_length // self._page_size
            whole = len(running.contents)
            self._write(running.pages[first:whole], running.contents[first:])
            self._keep(running)
            self._mover.free_device(running.pages[whole:])
            self._cache.release(running.claim)
            self._running.remove(running)
        self.counts = replace(self.counts, requests=self.counts.requests + len(finished))
        return bool(finished)

    # --- bytes and counts ----------------------------------------------------------------

    def _pages_of(self, request: Request) -> int:
        return -(-request.tokens // self._page_size)

    def _write(self, pages: Sequence[int], contents: Sequence[int]) -> None:
        if pages:
            self._bytes.write(pages, contents)

    def _check(self, where: str, wrong: Wrong, pages: list[int], contents: list[int]) -> None:
        if not pages:
            return
        found = wrong(pages, contents)
        if found:
            self.mismatches.append(f"{where}: {found} of {len(pages)} pages differ")
        self.counts = replace(
            self.counts,
            pages_checked=self.counts.pages_checked + len(pages),
            mismatched_pages=self.counts.mismatched_pages + found,
        )

    def _count_start(self, request: Request, match: Match) -> None:
        on_device = match.device_pages * self._page_size
        on_host = match.host_pages * self._page_size
        seen = leading_pages_seen(request, self._seen, self._page_size) * self._page_size
        self._seen.update(request.hash_ids)
        counts = self.counts
        self.counts = replace(
            counts,
            started=counts.started + 1,
            requests_hit_on_device=counts.requests_hit_on_device + (on_device > 0),
            requests_hit_on_host=counts.requests_hit_on_host + (on_host > 0),
            tokens_hit_on_device=counts.tokens_hit_on_device + on_device,
            tokens_hit_on_host=counts.tokens_hit_on_host + on_host,
            tokens_prefilled=counts.tokens_prefilled + request.input_length - on_device - on_host,
            tokens_prefilled_again=counts.tokens_prefilled_again
            + max(0, seen - on_device - on_host),
        )
