"""A small transformer that keeps its keys and values where SGLang does, and reads them as a model
does: layer by layer, through the pool's accessors, which wait for what is being loaded.

It is random and in float64; nothing about it is approximate, so the same KV gives the same bits.
"""

import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from ranks import Context
from real_cache import RealCache, build
from scenarios import moved
from setups import Probed, Setup
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from slowed import held, nobody_waits, on_device

from kvburst.sglang_plugin import status

HEADS, HEAD_DIM, VOCABULARY = 2, 16, 128
WIDTH = HEADS * HEAD_DIM
EXTEND_PAGES = 1
"""What is computed anew of a prompt that is found in the cache."""


@dataclass(frozen=True)
class Layer:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor


class SmallModel:
    """`layers` attention layers over a paged KV pool of `HEADS` heads."""

    def __init__(self, layers: int) -> None:
        numbers = torch.Generator().manual_seed(7)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            scale = rows**-0.5
            return scale * torch.randn(rows, columns, dtype=torch.float64, generator=numbers)

        self.embedding = matrix(VOCABULARY, WIDTH)
        self.layers = [Layer(*(matrix(WIDTH, WIDTH) for _ in range(4))) for _ in range(layers)]

    def extend(
        self, cache: RealCache, tokens: Sequence[int], have: torch.Tensor, new: torch.Tensor
    ) -> torch.Tensor:
        """Logits of the tokens behind those that `have` KV, whose own goes to the slots `new`."""
        kv = cache.kv
        slots = torch.cat([have, new])
        visible = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()[len(have) :]
        hidden = self.embedding[torch.tensor(tokens[len(have) :]) % VOCABULARY]
        for number, layer in enumerate(self.layers):
            normed = hidden / hidden.norm(dim=-1, keepdim=True)
            query, key, value = (
                (normed @ weights).view(-1, HEADS, HEAD_DIM)
                for weights in (layer.query, layer.key, layer.value)
            )
            kv.k_buffer[number][new] = key.to(torch.bfloat16)
            kv.v_buffer[number][new] = value.to(torch.bfloat16)
            keys = kv.get_key_buffer(number)[slots].double()
            values = kv.get_value_buffer(number)[slots].double()
            scores = torch.einsum("qhd,khd->hqk", query, keys) * HEAD_DIM**-0.5
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            mixed = torch.einsum("hqk,khd->qhd", weights, values).reshape(-1, WIDTH)
            hidden = hidden + mixed @ layer.output
        return hidden @ self.embedding.T

    def serve(self, cache: RealCache, tokens: Sequence[int]) -> None:
        """A prompt that nobody has asked before: its KV is computed and cached."""
        new = cache.take(len(tokens))
        assert new is not None
        self.extend(cache, tokens, torch.empty(0, dtype=torch.int64), new)
        key = cache.key(tokens)
        cache.tree.insert(InsertParams(key=key, value=new, prev_prefix_len=0))
        cache.step()

    def probe(self, cache: RealCache, tokens: Sequence[int], consumer: int = -1) -> torch.Tensor:
        """Logits of what comes behind the cached pages; the same shapes wherever they were."""
        cached = cache.device_slots(cache.match(tokens))
        have = cached[: len(tokens) - EXTEND_PAGES * cache.setup.page_size]
        assert len(have) == len(tokens) - EXTEND_PAGES * cache.setup.page_size
        new = cache.take(len(tokens) - len(have))
        assert new is not None
        counter = cache.controller.layer_done_counter
        counter.set_consumer(consumer)
        logits = self.extend(cache, tokens, have, new)
        counter.set_consumer(-1)
        cache.allocator.free(new)
        return logits


def probes(context: Context, setup: Setup, prompts: int, *, waits: bool) -> Probed:
    """Each prompt is served from the device, is evicted, and is served from the host.

    While it is read the copies of its load are held up, unless its forward is to wait for them.
    """
    begin = status()
    context.copies.forget()
    numbers = random.Random(5)
    model = SmallModel(setup.layers)
    differ = []
    with on_device() as device:
        cache = build(context, setup)
        for prompt in range(prompts):
            pages = numbers.randint(2, 6)
            tokens = [numbers.randrange(1, 30_000) for _ in range(pages * setup.page_size)]
            model.serve(cache, tokens)
            cache.settle()
            from_device = model.probe(cache, tokens)
            cache.evict(cache.allocator.size)
            cache.settle()
            cache.scribble_free_pages()
            assert cache.load_back(tokens) == len(tokens)
            with ExitStack() as stack:
                if not waits:
                    stack.enter_context(held(device))
                    stack.enter_context(nobody_waits())
                from_host = model.probe(cache, tokens, cache.start())
            cache.settle()
            if not torch.equal(from_host, from_device):
                differ.append(prompt)
    return Probed(prompts, differ, moved(begin, context.copies.total))
