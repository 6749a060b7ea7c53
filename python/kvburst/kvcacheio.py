"""SGLang's `direct` copies, `sgl_kernel.kvcacheio`, by name and signature, planned as bursts are.

Three functions, for whoever calls these today and has no controller: neighbouring pages travel
together, and a backup moves all layers of a page in one copy where the layers lie evenly spaced in
one allocation. The names follow the originals: `lf` is layer-first, which is the device's side
(one tensor `[slots, ...]` a layer), `pf` page-first, which is the host's (one tensor
`[pages, layers, page_size, ...]`). One side holds the latent KV, or K and then V: two host tensors,
and all layers' K followed by all layers' V on the device.

Indices are token slots, int32 or int64, of whole pages. Tensors are on the CPU, and a call returns
when every byte is in place. What is wrong with an argument is refused before anything moves, with a
LayoutError or a PageError that names it; so is a destination that occurs twice. Copies that fail
raise BurstError. The functions keep no state, and may be called from any thread.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from kvburst._core import (
    BurstError,
    BurstIssuer,
    BurstPages,
    HostDevice,
    LayoutError,
    PageError,
    PlanOptions,
)
from kvburst._indices import index_view
from kvburst.pools import DevicePool, HostPool, Pool

__all__ = [
    "transfer_kv_all_layer_direct_lf_pf",
    "transfer_kv_direct",
    "transfer_kv_per_layer_direct_pf_lf",
]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Loads pages: from host layer `layer_id` to `dst_ptrs[0]`, the next one to `dst_ptrs[1]`, ...

    src_ptrs: one page-first host tensor, or K's and V's.
    dst_ptrs: a tensor `[slots, ...]` for each layer that is loaded; with K and V first all of K.
    src_indices, dst_indices: slots on the host and on the device, as many of either.
    """
    pools = _page_first_pools("src_ptrs", src_ptrs, "dst_ptrs", dst_ptrs, layer_id, page_size)
    _transfer(pools, "load", ("dst_indices", dst_indices), ("src_indices", src_indices), page_size)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Backs up pages of all layers: `src_ptrs[l]` to host layer *l*.

    src_ptrs: a tensor `[slots, ...]` a layer; with K and V first all of K.
    dst_ptrs: one page-first host tensor, or K's and V's.
    src_indices, dst_indices: slots on the device and on the host, as many of either.
    """
    pools = _page_first_pools("dst_ptrs", dst_ptrs, "src_ptrs", src_ptrs, 0, page_size)
    _transfer(
        pools, "backup", ("src_indices", src_indices), ("dst_indices", dst_indices), page_size
    )


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copies slots between layer-first buffers, either way: `src_layers[i]` to `dst_layers[i]`.

    Where the slots of a page do not follow each other, or start in the middle of one, each is
    copied by itself, as the original does; only their number must be a multiple of `page_size`.
    """
    if len(src_layers) != len(dst_layers) or not src_layers:
        raise LayoutError(
            f"src_layers: {len(src_layers)} layers for {len(dst_layers)} dst_layers,"
            " must be as many, and at least 1"
        )
    _check_page_size(page_size)
    _check_count("src_indices", src_indices, page_size)
    _check_count("dst_indices", dst_indices, page_size)
    if not (
        _are_pages(src_indices, page_size)
        and _are_pages(dst_indices, page_size)
        and all(layer.shape[0] % page_size == 0 for layer in (*src_layers, *dst_layers))
    ):
        page_size = 1
    pools = []
    for layer, (src, dst) in enumerate(zip(src_layers, dst_layers, strict=True)):
        name = f"layer {layer}"
        _check_alike(f"src_layers[{layer}]", src, f"dst_layers[{layer}]", dst)
        to = DevicePool.from_layers(name, [dst], page_size=page_size)
        pages = src.view(1, src.shape[0] // page_size, page_size, *src.shape[1:])
        pools.append(Pool.pair(to, HostPool.from_tensor(to, pages, layout="layer_first")))
    _transfer(pools, "load", ("dst_indices", dst_indices), ("src_indices", src_indices), page_size)


# --- describing ----------------------------------------------------------------------------


def _page_first_pools(
    host_name: str,
    host: Sequence[torch.Tensor],
    device_name: str,
    device: Sequence[torch.Tensor],
    first_layer: int,
    page_size: int,
) -> list[Pool]:
    """One pool for each host tensor, with an equal share of the device's layers."""
    _check_page_size(page_size)
    if len(host) not in (1, 2):
        raise LayoutError(f"{host_name}: {len(host)} tensors, must be 1, or 2 for K and V")
    layers, over = divmod(len(device), len(host))
    if over or not layers:
        raise LayoutError(
            f"{device_name}: {len(device)} layers for {len(host)} {host_name},"
            f" must be a multiple of {len(host)}, and at least that"
        )
    pools = []
    for index, tensor in enumerate(host):
        what = f"{host_name}[{index}]"
        if tensor.dim() < 4 or tensor.shape[2] != page_size:
            raise LayoutError(
                f"{what}: shape {tuple(tensor.shape)}, must be"
                f" [pages, layers, {page_size}, ...], with page_size {page_size}"
            )
        if not 0 <= first_layer <= tensor.shape[1] - layers:
            raise LayoutError(
                f"layer_id: {first_layer} and {layers} layers from there are not within the"
                f" {tensor.shape[1]} layers of {what}, shape {tuple(tensor.shape)}"
            )
        own = device[index * layers : (index + 1) * layers]
        for layer, each in enumerate(own, index * layers):
            _check_on_cpu(f"{device_name}[{layer}]", each)
            _check_same_row(f"{device_name}[{layer}]", each, what, tensor, page_size)
        _check_on_cpu(what, tensor)
        on_device = DevicePool.from_layers(what, own, page_size=page_size)
        on_host = HostPool(
            name=what,
            layout="page_first_direct",
            layer_ids=on_device.layer_ids,
            rows=tuple(range(first_layer, first_layer + layers)),
            tensor=tensor,
        )
        pools.append(Pool.pair(on_device, on_host))
    return pools


def _are_pages(indices: torch.Tensor, page_size: int) -> bool:
    """Whether they name whole pages, each from its first slot on."""
    pages = indices.reshape(-1, page_size)
    starts = pages[:, :1]
    slots = torch.arange(page_size, dtype=indices.dtype, device=indices.device)
    return bool((starts % page_size == 0).all()) and bool((pages == starts + slots).all())


def _row_bytes(tensor: torch.Tensor, outer: int) -> int:
    """Bytes behind one index of the first `outer` axes."""
    return tensor[(0,) * outer].numel() * tensor.element_size() if tensor.numel() else 0


# --- refusing ------------------------------------------------------------------------------


def _check_page_size(page_size: int) -> None:
    if page_size < 1:
        raise PageError(f"page_size: {page_size} is below 1")


def _check_count(name: str, indices: torch.Tensor, page_size: int) -> None:
    index_view(name, indices)
    if indices.numel() % page_size:
        raise PageError(
            f"{name}: {indices.numel()} slots is not a multiple of page_size {page_size}"
        )


def _check_on_cpu(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise LayoutError(f"{name}: on device {tensor.device}, must be on the CPU")


def _check_same_row(
    device_name: str, device: torch.Tensor, host_name: str, host: torch.Tensor, page_size: int
) -> None:
    """A page has as many bytes on either side, of the same type."""
    if device.dtype != host.dtype:
        raise LayoutError(f"{device_name}: dtype {device.dtype}, in {host_name} it is {host.dtype}")
    ours, theirs = page_size * _row_bytes(device, 1), page_size * _row_bytes(host, 3)
    if ours != theirs:
        raise LayoutError(
            f"{device_name}: a page of a layer has {ours} bytes, in {host_name} it has {theirs}"
        )


def _check_alike(src_name: str, src: torch.Tensor, dst_name: str, dst: torch.Tensor) -> None:
    for name, tensor in ((src_name, src), (dst_name, dst)):
        _check_on_cpu(name, tensor)
        if tensor.dim() < 2:
            raise LayoutError(f"{name}: shape {tuple(tensor.shape)}, must be [slots, ...]")
    if src.dtype != dst.dtype or src.shape[1:] != dst.shape[1:]:
        raise LayoutError(
            f"{src_name}: rows of {tuple(src.shape[1:])} {src.dtype}, in {dst_name} they are"
            f" {tuple(dst.shape[1:])} {dst.dtype}"
        )


# --- moving --------------------------------------------------------------------------------


def _transfer(
    pools: Sequence[Pool],
    direction: Literal["load", "backup"],
    device: tuple[str, torch.Tensor],
    host: tuple[str, torch.Tensor],
    page_size: int,
) -> None:
    """Moves the pages that these two (name, slots) pair, and waits for them."""
    layouts = [pool.layout for pool in pools]
    pages = BurstPages(layouts, direction=direction, page_size=page_size, check="slots")
    pages.append(device=index_view(*device), host=index_view(*host))
    # On the CPU nothing runs ahead of a copy that it had to be ordered behind, so a device of its
    # own will do, which costs a call two short-lived threads.
    with_device = HostDevice()
    burst = BurstIssuer(
        with_device,
        layouts,
        direction=direction,
        options=PlanOptions(ramp=False),
        memory=tuple(pools),
    ).submit(pages, [0], stream=with_device.current_stream())
    if burst is None:
        return
    burst.finish_event.synchronize()
    if burst.error is not None:
        raise BurstError(burst.error)
