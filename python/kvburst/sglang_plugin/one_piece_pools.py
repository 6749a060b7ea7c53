"""Device pools whose layers lie in one allocation, evenly spaced, so that a copy can span them.

SGLang allocates every layer on its own. Its own code goes on doing so here, in its own memory
regions; only what it is given are views of one allocation, made at the first layer.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvburst.sglang_plugin.plugin import Plugin


class _OnePiece(TorchFunctionMode):
    """Serves ``torch.zeros`` of one shape, `layers` times, out of one allocation.

    Other shapes, up to as many, get an allocation each; tensors without elements are left alone.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self._layers = layers
        self._left: dict[tuple[Any, ...], list[torch.Tensor]] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        shape = args[0] if func is torch.zeros and len(args) == 1 else None
        if not isinstance(shape, tuple) or 0 in shape:
            return func(*args, **kwargs)
        key = (shape, *sorted((name, str(value)) for name, value in kwargs.items()))
        if key not in self._left:
            whole = torch.zeros((self._layers, *shape), **kwargs)
            self._left[key] = list(whole.unbind(0))
        if not self._left[key]:
            raise RuntimeError(f"one-piece pool: more than {self._layers} layers of shape {shape}")
        return self._left[key].pop(0)

    def check_used(self) -> None:
        """Raises RuntimeError if memory was allocated for layers that nobody asked for."""
        for (shape, *_), left in self._left.items():
            if left:
                raise RuntimeError(
                    f"one-piece pool: {len(left)} of {self._layers} layers of shape {shape} were"
                    " never taken"
                )


class OnePiecePools:
    """Hooks around the functions that allocate. A pool that is made otherwise is left alone."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin

    def mla(self, original: Callable[[Any], None], pool: Any) -> None:
        self._allocate(original, pool, pool.layer_num)

    def mha(self, original: Callable[[Any], None], pool: Any) -> None:
        self._allocate(original, pool, pool.layer_num)

    def index_k(self, original: Callable[[Any], Any], pool: Any) -> Any:
        return self._allocate(original, pool, pool.skip_topk_layers.count(False))

    def _allocate(self, original: Callable[[Any], Any], pool: Any, layers: int) -> Any:
        if self._plugin.disabled or layers < 2:
            return original(pool)
        piece = _OnePiece(layers)
        with piece:
            result = original(pool)
        piece.check_used()
        self._plugin.one_piece_pools += 1
        return result
