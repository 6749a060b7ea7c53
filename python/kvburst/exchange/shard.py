"""What a controller is told about sharing its host tier with other ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvburst._core import Device, LayerGate, LayoutError
from kvburst.exchange.channel import Channel
from kvburst.exchange.exchange import Exchange
from kvburst.exchange.forward_stream import ForwardStreamExchange
from kvburst.exchange.side_stream import SideStreamExchange
from kvburst.ownership import ExchangeOrder, Ownership
from kvburst.pools import Pool

_ORDERS: dict[ExchangeOrder, type[Exchange]] = {
    "forward_stream": ForwardStreamExchange,
    "side_stream": SideStreamExchange,
}


def _never() -> bool:
    return False


@dataclass(frozen=True)
class RankShard:
    """One rank's part of a host tier that the ranks of `channel` share; the same on all of them.

    The pools' host tiers hold `ownership.layers_of(channel.rank, pool)` and no other layer.
    `staging_bytes` of device memory are broadcast at a time. `capturing` says whether the current
    stream is being captured into a graph, where no layer can be exchanged.
    """

    ownership: Ownership
    channel: Channel
    exchange: ExchangeOrder = "forward_stream"
    staging_bytes: int = 32 << 20
    capturing: Callable[[], bool] = _never

    def __post_init__(self) -> None:
        if self.exchange not in get_args(ExchangeOrder):
            raise LayoutError(
                f"exchange: {self.exchange!r} must be 'forward_stream' or 'side_stream'"
            )

    def open(
        self,
        pools: Sequence[Pool],
        device: Device,
        gate: LayerGate,
        mode: Literal["thread", "inline"],
    ) -> Exchange:
        """The exchange of a controller whose loads have `gate` and are issued in `mode`.

        Every rank calls it: they compare what must be the same. Raises LayoutError, on all of them
        if it is not.
        """
        if self.exchange == "side_stream" and mode != "inline":
            raise LayoutError(f"exchange: 'side_stream' needs mode 'inline', it is {mode!r}")
        if self.exchange == "side_stream" and not self.channel.numbers_apart:
            raise LayoutError(
                "channel: 'side_stream' needs a cpu_group apart from the group that broadcasts"
            )
        return _ORDERS[self.exchange](
            pools,
            device,
            gate,
            self.ownership,
            self.channel,
            staging_bytes=self.staging_bytes,
            capturing=self.capturing,
        )
