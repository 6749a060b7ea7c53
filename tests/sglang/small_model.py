"""A small transformer that keeps its keys and values where SGLang does, and reads them as a model
does: layer by layer, through the pool's accessors, which wait for what is being loaded.

It is random and in float64; nothing about it is approximate, so the same KV gives the same bits.
"""

import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import torch
from ranks import Context
from real_cache import RealCache, build
from scenarios import moved
from setups import Probed, Setup
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sharded import nothing_exchanged
from slowed import held, nobody_waits, on_device

from kvburst.sglang_plugin import status

HEADS, HEAD_DIM, VOCABULARY = 2, 16, 128
WIDTH = HEADS * HEAD_DIM
LATENT, ROPE, INDEX = 48, 16, 128
"""Of a latent pool's rows; and bytes of a token's index key."""
EXTEND_PAGES = 1
"""What is computed anew of a prompt that is found in the cache."""


@dataclass(frozen=True)
class Layer:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    index: torch.Tensor


class SmallModel:
    """Attention layers over a paged KV pool: of heads, or of one latent row that all heads share.

    Where the pool has index keys as well, a layer that has them attends to the better half alone.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        latent = setup.model != "mha"
        self.key_dim = LATENT + ROPE if latent else HEAD_DIM
        self.value_dim = LATENT if latent else HEAD_DIM
        kept = 1 if latent else HEADS
        numbers = torch.Generator().manual_seed(7)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            scale = rows**-0.5
            return scale * torch.randn(rows, columns, dtype=torch.float64, generator=numbers)

        self.embedding = matrix(VOCABULARY, WIDTH)
        self.layers = [
            Layer(
                query=matrix(WIDTH, HEADS * self.key_dim),
                key=matrix(WIDTH, kept * self.key_dim),
                value=matrix(WIDTH, kept * self.value_dim),
                output=matrix(HEADS * self.value_dim, WIDTH),
                index=matrix(WIDTH, INDEX),
            )
            for _ in range(setup.layers)
        ]

    def extend(
        self, cache: RealCache, tokens: Sequence[int], have: torch.Tensor, new: torch.Tensor
    ) -> torch.Tensor:
        """Logits of the tokens behind those that `have` KV, whose own goes to the slots `new`."""
        slots = torch.cat([have, new])
        causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()[len(have) :]
        hidden = self.embedding[torch.tensor(tokens[len(have) :]) % VOCABULARY]
        for number, layer in enumerate(self.layers):
            normed = hidden / hidden.norm(dim=-1, keepdim=True)
            visible = causal & self._chosen(cache.kv, number, normed, new, slots)
            query = (normed @ layer.query).view(-1, HEADS, self.key_dim)
            keys, values = self._kept(cache.kv, number, normed, new, slots)
            scores = torch.einsum("qhd,khd->hqk", query, keys) * self.key_dim**-0.5
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            mixed = torch.einsum("hqk,khd->qhd", weights, values).flatten(1)
            hidden = hidden + mixed @ layer.output
        return hidden @ self.embedding.T

    def _kept(
        self, kv: Any, number: int, normed: torch.Tensor, new: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `slots`, `[slots, heads, dim]`, with those of `new` written first."""
        layer = self.layers[number]
        key = (normed @ layer.key).view(len(new), -1, self.key_dim).to(torch.bfloat16)
        if self.setup.model == "mha":
            value = (normed @ layer.value).view(len(new), -1, self.value_dim)
            kv.k_buffer[number][new] = key
            kv.v_buffer[number][new] = value.to(torch.bfloat16)
            return (
                kv.get_key_buffer(number)[slots].double(),
                kv.get_value_buffer(number)[slots].double(),
            )
        kv.kv_buffer[number][new] = key
        rows = kv.get_key_buffer(number)[slots].double().expand(-1, HEADS, -1)
        return rows, rows[..., :LATENT]

    def _chosen(
        self, kv: Any, number: int, normed: torch.Tensor, new: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Of `slots`, for each of `new`, by index keys of one bit a byte; itself always."""
        if self.setup.model != "dsa" or number in self.setup.without_index:
            return torch.ones(len(new), len(slots), dtype=torch.bool)
        size = self.setup.page_size
        own = (normed @ self.layers[number].index > 0).to(torch.uint8)
        buffer = kv.index_k_with_scale_buffer[number]
        for slot, key in zip(new.tolist(), own, strict=True):
            buffer[slot // size, slot % size * INDEX :][:INDEX] = key
        pages = kv.get_index_k_with_scale_buffer(number)[slots // size]
        keys = pages[:, : size * INDEX].view(len(slots), size, INDEX)
        found = keys[torch.arange(len(slots)), slots % size]
        agree = (own[:, None] == found[None]).sum(-1)
        chosen = agree >= agree.median(-1, keepdim=True).values
        return chosen | (new[:, None] == slots[None])

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


def probes(
    context: Context, setup: Setup, prompts: int, *, waits: bool, alone: bool = False
) -> Probed:
    """Each prompt is served from the device, is evicted, and is served from the host.

    While it is read the copies of its load are held up, unless its forward is to wait for them.
    `alone`: a rank that has nobody to share a tier with.
    """
    if alone:
        context = replace(context, group=None)
    begin = status()
    context.copies.forget()
    numbers = random.Random(5)
    model = SmallModel(setup)
    differ = []
    logits = blake2b(digest_size=8)
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
            logits.update(from_host.numpy().tobytes())
    return Probed(prompts, differ, logits.hexdigest(), moved(begin, context.copies.total))


def probes_without_exchange(context: Context, setup: Setup, prompts: int) -> Probed:
    """What other ranks own never comes."""
    with nothing_exchanged():
        return probes(context, setup, prompts, waits=True)
