"""The released SGLang's tree, controller and pools, small and on the CPU, and what a scheduler does
to them. Only for processes that have SGLang (`ranks`).

What lies in a page is decided by the tokens up to its end, the pool, the layer and, where ranks
hold different heads, the rank. So whoever finds a page anywhere knows what must be in it.
"""

import atexit
import hashlib
import itertools
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from ranks import Context
from setups import Setup
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

SCRIBBLE = 0x5C


@dataclass(frozen=True)
class Buffer:
    """One kind of KV: bytes as `[pages, page bytes]` of each layer, and how a model reads it."""

    name: str
    layer_ids: Sequence[int]
    layers: Sequence[torch.Tensor]
    read: Callable[[int], torch.Tensor]
    """A layer's whole tensor, through the pool's accessor, which waits for a load-back."""
    is_draft: bool = False


@dataclass
class RealCache:
    setup: Setup
    context: Context
    kv: Any
    allocator: Any
    requests: Any
    tree: Any
    buffers: Sequence[Buffer]
    _bytes: dict[bytes, list[torch.Tensor]] = field(default_factory=dict)
    _rids: Iterator[int] = field(default_factory=itertools.count)

    @property
    def controller(self) -> Any:
        return self.tree.cache_controller

    # --- what is in a page ---------------------------------------------------------------------

    def bytes_of(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """Of the page that ends with the last of `tokens`: `[layers, page bytes]` a buffer."""
        digest = hashlib.blake2b(array("q", tokens).tobytes(), digest_size=7)
        if self.setup.model == "mha":
            digest.update(bytes([self.context.rank]))
        name = digest.digest()
        if name not in self._bytes:
            random = torch.Generator().manual_seed(int.from_bytes(name, "big"))
            self._bytes[name] = [
                torch.randint(
                    0,
                    256,
                    (len(buffer.layers), buffer.layers[0].shape[1]),
                    dtype=torch.uint8,
                    generator=random,
                )
                for buffer in self.buffers
            ]
        return self._bytes[name]

    def pages_of(self, slots: torch.Tensor) -> list[int]:
        return (slots[:: self.setup.page_size] // self.setup.page_size).tolist()

    def write(self, tokens: Sequence[int], slots: torch.Tensor, first_page: int = 0) -> None:
        """A forward fills the pages of `tokens` from `first_page` on."""
        size = self.setup.page_size
        for number, page in enumerate(self.pages_of(slots), first_page):
            contents = self.bytes_of(tokens[: (number + 1) * size])
            for buffer, content in zip(self.buffers, contents, strict=True):
                for layer, bytes_ in zip(buffer.layers, content, strict=True):
                    layer[page] = bytes_

    def wrong_pages(
        self, tokens: Sequence[int], slots: torch.Tensor, *, waiting: bool = True
    ) -> list[str]:
        """Every page and layer of `tokens`, read as a model does, that is not what it must be.

        Layer by layer: of each layer all pages are read before the next layer is waited for. Then
        the drafts, which run behind the target. If not `waiting`, what is in memory now.
        """
        size = self.setup.page_size
        pages = self.pages_of(slots)
        contents = [self.bytes_of(tokens[: (number + 1) * size]) for number in range(len(pages))]
        kinds = list(enumerate(self.buffers))
        targets = [each for each in kinds if not each[1].is_draft]
        drafts = [each for each in kinds if each[1].is_draft]
        order = [(layer, each) for layer in range(self.setup.layers) for each in targets]
        order += [(0, each) for each in drafts]
        wrong = []
        for layer, (kind, buffer) in order:
            if layer not in buffer.layer_ids:
                continue
            position = buffer.layer_ids.index(layer)
            found = buffer.layers[position]
            if waiting:
                found = as_pages(buffer.read(layer), found.shape[0])
            for number, page in enumerate(pages):
                if not torch.equal(found[page], contents[number][kind][position]):
                    wrong.append(f"{buffer.name}, layer {layer}, page {number}")
        return wrong

    def scribble_free_pages(self) -> None:
        """Whatever is read from a page that nobody has must not be anything."""
        free = self.allocator.get_all_free_pages()
        for buffer in self.buffers:
            for layer in buffer.layers:
                layer[free] = SCRIBBLE

    def device_bytes(self) -> list[torch.Tensor]:
        """`[pages, layers, page bytes]` of each buffer, copied."""
        return [torch.stack(tuple(buffer.layers), dim=1) for buffer in self.buffers]

    def host_bytes(self) -> list[torch.Tensor]:
        """`[pages, bytes of all layers]` of each host buffer, copied."""
        return [
            pages.contiguous().view(torch.uint8).reshape(pages.shape[0], -1).clone()
            for entry in self.controller.mem_pool_host.entries
            for pages in host_tensors(entry.host_pool)
        ]

    # --- what a scheduler does -----------------------------------------------------------------

    def key(self, tokens: Sequence[int]) -> RadixKey:
        return RadixKey(array("q", tokens))

    def match(self, tokens: Sequence[int]) -> Any:
        return self.tree.match_prefix(MatchPrefixParams(key=self.key(tokens)))

    def device_slots(self, match: Any) -> torch.Tensor:
        """Of the pages that a match found on the device."""
        root = self.tree.root_node_handle()
        return self.tree.tree_core.collect_full_device_indices(match.last_device_node, root)

    def insert(self, tokens: Sequence[int]) -> bool:
        """Computes what is not on the device yet, and caches it. False if there is no room."""
        match = self.match(tokens)
        have = match.device_prefix_len
        lock = self.tree.inc_lock_ref(match.last_device_node).to_dec_params()
        try:
            slots = self.take(len(tokens) - have)
        finally:
            self.tree.dec_lock_ref(match.last_device_node, lock)
        if slots is None:
            return False
        self.write(tokens, slots, have // self.setup.page_size)
        value = torch.cat([self.device_slots(match), slots])
        # The tree frees what it has already beyond `have`.
        self.tree.insert(InsertParams(key=self.key(tokens), value=value, prev_prefix_len=have))
        return True

    def take(self, slots: int) -> torch.Tensor | None:
        """Device slots, for which others may have to go."""
        missing = slots - self.allocator.available_size()
        if missing > 0:
            self.tree.evict(EvictParams(num_tokens=missing))
        taken: torch.Tensor | None = self.allocator.alloc(slots)
        return taken

    def evict(self, slots: int) -> int:
        return int(self.tree.evict(EvictParams(num_tokens=slots)).num_tokens_evicted)

    def request(self, tokens: Sequence[int]) -> Req:
        return Req(
            rid=str(next(self._rids)),
            origin_input_text="",
            origin_input_ids=array("q", tokens),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
        )

    def load_back(self, tokens: Sequence[int]) -> int:
        """Admits a request: what the host has of `tokens` is to be loaded. Returns how many slots
        are; they leave at `start`."""
        match = self.match(tokens)
        request = self.request(tokens)
        request.last_node = match.last_device_node
        result = self.tree.init_load_back(
            InitLoadBackParams(
                best_match_node=match.best_match_node,
                host_hit_length=match.host_hit_length,
                req=request,
            )
        )
        return int(result[0])

    def start(self) -> int:
        """Starts the loads of admitted requests; what a forward waits with."""
        return int(self.tree.ready_to_load_host_cache())

    def forward(self, consumer: int, tokens: Sequence[int]) -> list[str]:
        """Reads `tokens` from the device as the forward of that load does; what is wrong."""
        counter = self.controller.layer_done_counter
        counter.set_consumer(consumer)
        try:
            match = self.match(tokens)
            return self.wrong_pages(tokens[: match.device_prefix_len], self.device_slots(match))
        finally:
            counter.set_consumer(-1)

    def in_memory(self, tokens: Sequence[int]) -> list[str]:
        """What of `tokens` is on the device by the tree, and not in its memory; nobody waits."""
        match = self.match(tokens)
        slots = self.device_slots(match)
        return self.wrong_pages(tokens[: match.device_prefix_len], slots, waiting=False)

    def step(self) -> None:
        """What the scheduler does once a step."""
        self.tree.check_hicache_events()

    def settle(self, seconds: float = 60) -> None:
        """Steps until nothing is under way, on every rank: they all take as many."""
        deadline = time.monotonic() + seconds
        while self.tree.ongoing_write_through or self.tree.ongoing_load_back:
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"still under way after {seconds} s: {self.tree.ongoing_write_through}"
                    f" {self.tree.ongoing_load_back}"
                )
            self.step()
            time.sleep(0.0005)


def host_tensors(pool: Any) -> list[torch.Tensor]:
    """`[pages, layers, ...]` of each buffer of a host pool, as views. A rank that shares its tier
    may keep no layer of a pool, and has no buffer."""
    match pool:
        case DSAIndexerPoolHost():
            tensors, slots_a_page = [pool.index_k_with_scale_buffer], 1
        case MHATokenToKVPoolHost():
            tensors, slots_a_page = [pool.k_buffer, pool.v_buffer], pool.page_size
        case _:
            tensors, slots_a_page = [pool.kv_buffer], pool.page_size
    if tensors[0] is None:
        return []
    if pool.layout != "layer_first":
        return tensors
    return [tensor.unflatten(1, (-1, slots_a_page)).transpose(0, 1) for tensor in tensors]


def as_pages(tensor: torch.Tensor, pages: int) -> torch.Tensor:
    """The same memory as bytes, `[pages, page bytes]`."""
    return tensor.view(torch.uint8).view(pages, -1)


def build(context: Context, setup: Setup) -> RealCache:
    size = setup.page_size
    slots = setup.pages * size
    arguments = ServerArgs(
        model_path="dummy",
        page_size=size,
        hicache_io_backend=setup.io_backend,
        hicache_mem_layout=setup.layout,
        hicache_write_policy=setup.policy,
        hicache_ratio=2.0,
    )
    set_global_server_args_for_scheduler(arguments)
    kv, buffers = _pools(setup, slots)
    drafts = []
    for number in range(setup.drafts):
        draft, own = _pools(replace(setup, layers=1, without_index=()), slots)
        drafts.append(draft)
        buffers += [
            replace(each, name=f"draft {number} {each.name}", is_draft=True) for each in own
        ]
    allocator = PagedTokenToKVPoolAllocator(slots, size, torch.bfloat16, "cpu", kv, False)
    requests = ReqToTokenPool(size=8, max_context_len=1024, device="cpu", enable_memory_saver=False)
    parameters = CacheInitParams(
        disable=False,
        req_to_token_pool=requests,
        token_to_kv_pool_allocator=allocator,
        page_size=size,
        tp_cache_group=context.group,
        tree_components=(ComponentType.FULL,),
        mtp_draft_device_pools=tuple(drafts),
    )
    tree = UnifiedRadixCache(parameters)
    tree.init_hicache(arguments, parameters)
    atexit.unregister(tree.shutdown)
    tree.write_through_threshold = 1
    tree.load_back_threshold = 0
    return RealCache(setup, context, kv, allocator, requests, tree, buffers)


def _pools(setup: Setup, slots: int) -> tuple[Any, list[Buffer]]:
    common: dict[str, Any] = {
        "size": slots,
        "page_size": setup.page_size,
        "dtype": torch.bfloat16,
        "layer_num": setup.layers,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    pages = setup.pages + 1

    def buffer(
        name: str, layers: Sequence[torch.Tensor], read: Callable[[int], torch.Tensor]
    ) -> Buffer:
        there = [(number, layer) for number, layer in enumerate(layers) if layer.shape[0]]
        layer_ids = [number for number, _ in there]
        return Buffer(name, layer_ids, [as_pages(layer, pages) for _, layer in there], read)

    if setup.model == "mha":
        kv = MHATokenToKVPool(**common, head_num=2, head_dim=16)
        return kv, [
            buffer("k", kv.k_buffer, kv.get_key_buffer),
            buffer("v", kv.v_buffer, kv.get_value_buffer),
        ]
    latent = {"kv_lora_rank": 48, "qk_rope_head_dim": 16}
    if setup.model == "mla":
        kv = MLATokenToKVPool(**common, **latent)
        return kv, [buffer("kv", kv.kv_buffer, kv.get_key_buffer)]
    kv = DSATokenToKVPool(
        **common,
        **latent,
        kv_cache_dim=64,
        index_head_dim=128,
        skip_topk_layers=[layer in setup.without_index for layer in range(setup.layers)],
    )
    return kv, [
        buffer("kv", kv.kv_buffer, kv.get_key_buffer),
        buffer("index_k", kv.index_k_with_scale_buffer, kv.get_index_k_with_scale_buffer),
    ]
