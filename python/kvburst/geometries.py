"""Geometries people run, by name: the pools of a model and the bytes that a token takes in each.

A geometry holds no memory. ``pools.DevicePool.allocate`` turns one of its pools into tensors.
"""

from dataclasses import dataclass

from kvburst._core import LayoutError


@dataclass(frozen=True)
class PoolSpec:
    """What one pool of a model stores.

    ``row_bytes`` is one token's row of one layer, in bytes. ``layer_ids`` are the model layers that
    store it, strictly increasing. ``paged`` says that a layer's tensor counts pages in its first
    dimension (``[pages, page_size * row_bytes]``) and not slots (``[slots, row_bytes]``): the bytes
    of a page are not token by token. ``own_allocation`` names the layers that never share a tensor
    with the others, such as a draft model's. ``replicated`` says that under tensor parallelism
    every rank holds the same bytes.
    """

    name: str
    row_bytes: int
    layer_ids: tuple[int, ...]
    paged: bool = False
    own_allocation: tuple[int, ...] = ()
    replicated: bool = True

    def __post_init__(self) -> None:
        if self.row_bytes < 1:
            raise LayoutError(f"pool {self.name!r}: row_bytes: {self.row_bytes} is below 1")
        check_layer_ids(f"pool {self.name!r}: layer_ids", self.layer_ids)
        unknown = sorted(set(self.own_allocation) - set(self.layer_ids))
        if unknown:
            raise LayoutError(
                f"pool {self.name!r}: own_allocation: layer {unknown[0]} is not one of the"
                f" {len(self.layer_ids)} in layer_ids"
            )

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page of one layer, for ``page_size`` slots a page."""
        return page_size * self.row_bytes


@dataclass(frozen=True)
class Geometry:
    """The pools of one model on one rank.

    ``page_size`` is in slots, ``source`` says where the numbers come from.
    """

    name: str
    page_size: int
    pools: tuple[PoolSpec, ...]
    source: str

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise LayoutError(f"geometry {self.name!r}: page_size: {self.page_size} is below 1")
        if not self.pools:
            raise LayoutError(f"geometry {self.name!r}: pools: 0 pools, at least 1 is needed")

    @property
    def num_layers(self) -> int:
        """Highest layer id of any pool, plus one."""
        return max(pool.layer_ids[-1] for pool in self.pools) + 1

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers and pools."""
        return sum(pool.row_bytes * len(pool.layer_ids) for pool in self.pools)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers and pools."""
        return self.page_size * self.bytes_per_token


def check_layer_ids(what: str, layer_ids: tuple[int, ...]) -> None:
    """Refuses with ``LayoutError`` what is not strictly increasing from 0 on, or empty."""
    if not layer_ids:
        raise LayoutError(f"{what}: 0 layers, at least 1 is needed")
    lowest = 0
    for position, layer in enumerate(layer_ids):
        if layer < lowest:
            raise LayoutError(
                f"{what}: {layer} at position {position} must be at least {lowest}"
                " (strictly increasing from 0)"
            )
        lowest = layer + 1


BFLOAT16 = 2
FLOAT32 = 4

# DeepSeek-V3's published config.json: kv_lora_rank 512, qk_rope_head_dim 64, num_hidden_layers 61,
# num_nextn_predict_layers 1 (the draft layer, stored as layer 61). SGLang keeps the latent and the
# rope part of a token in one bf16 row of 1,152 bytes; FlashMLA works on pages of 64 slots.
MLA_ROW = (512 + 64) * BFLOAT16
MLA_LAYERS = 61

# The FP8 cache format of FlashMLA, as vLLM's flashmla_sparse documentation has it: 512 fp8 values,
# one float32 scale for each 128 of them, 64 unquantised bf16 rope values: 656 bytes a token.
FP8_MLA_ROW = 512 + 512 // 128 * FLOAT32 + 64 * BFLOAT16

# index_head_dim 128: one fp8 key and one float32 scale for each 128 values, 132 bytes a token. A
# page of SGLang's index_k_with_scale_buffer holds its 64 keys first and its 64 scales after them.
INDEX_K_ROW = 128 + 128 // 128 * FLOAT32
DSA_LAYERS = 78

# GLM-5.2's config.json: index_topk_freq 4, index_skip_topk_offset 3. A layer whose
# max(layer - offset + 1, 0) is no multiple of freq reuses an earlier layer's choice and stores no
# index-K, which leaves 21 of 78 (sgl-project/sglang#30531, sgl-project/sglang#38426).
INDEXER_LAYERS = tuple(layer for layer in range(DSA_LAYERS) if max(layer - 3 + 1, 0) % 4 == 0)

# Llama 3.1 70B's published config.json: num_hidden_layers 80, num_key_value_heads 8, head_dim 128.
GQA_LAYERS = 80
GQA_HEADS = 8
GQA_HEAD_ROW = 128 * BFLOAT16


def _mla_dsa(name: str, indexer_layers: tuple[int, ...], source: str) -> Geometry:
    return Geometry(
        name=name,
        page_size=64,
        pools=(
            PoolSpec("kv", FP8_MLA_ROW, tuple(range(DSA_LAYERS))),
            PoolSpec("index_k", INDEX_K_ROW, indexer_layers, paged=True),
        ),
        source=source,
    )


def _llama_70b(name: str, heads: int, source: str) -> Geometry:
    layers = tuple(range(GQA_LAYERS))
    return Geometry(
        name=name,
        page_size=64,
        pools=(
            PoolSpec("k", heads * GQA_HEAD_ROW, layers, replicated=False),
            PoolSpec("v", heads * GQA_HEAD_ROW, layers, replicated=False),
        ),
        source=source,
    )


GEOMETRIES = (
    Geometry(
        name="deepseek-v3",
        page_size=64,
        pools=(PoolSpec("kv", MLA_ROW, tuple(range(MLA_LAYERS))),),
        source="DeepSeek-V3 config.json: 61 layers, MLA 512 + 64 values in bf16",
    ),
    # The draft layer of a NextN model is packed behind the target's: one more row of the same host
    # page, while its device tensor stays the draft model's own (sgl-project/sglang#30393).
    Geometry(
        name="deepseek-v3-mtp",
        page_size=64,
        pools=(
            PoolSpec("kv", MLA_ROW, tuple(range(MLA_LAYERS + 1)), own_allocation=(MLA_LAYERS,)),
        ),
        source="DeepSeek-V3 config.json: 61 layers and one packed MTP draft layer",
    ),
    _mla_dsa(
        "mla-dsa-78",
        INDEXER_LAYERS,
        "GLM-5.2 config.json: 78 layers, fp8 MLA, index-K in the 21 layers that run the indexer",
    ),
    _mla_dsa(
        "mla-dsa-78-full",
        tuple(range(DSA_LAYERS)),
        "GLM-5.1 config.json: 78 layers, fp8 MLA, index-K in every layer",
    ),
    _llama_70b(
        "llama-3.1-70b",
        GQA_HEADS,
        "Llama 3.1 70B config.json: 80 layers, all 8 KV heads of 128 values in bf16 on one rank",
    ),
    # What one of eight ranks holds: tensor parallelism deals the 8 KV heads out, one a rank.
    _llama_70b(
        "llama-3.1-70b-tp8",
        GQA_HEADS // 8,
        "Llama 3.1 70B config.json: 80 layers, 1 of 8 KV heads of 128 values in bf16 (TP 8)",
    ),
)


def geometry(name: str) -> Geometry:
    """The geometry of that name. Raises ``LayoutError``, naming the known ones, for any other."""
    for known in GEOMETRIES:
        if known.name == name:
            return known
    names = ", ".join(known.name for known in GEOMETRIES)
    raise LayoutError(f"geometry: {name!r} is unknown; known are {names}")
