"""What ranks that share one host copy of each layer send each other.

A rank backs up, keeps and loads the layers that it owns (`kvburst.ownership`); whatever else a load
brings it gets from the owners, layer by layer: gather, broadcast, scatter.

Where the exchange is enqueued decides whether it can deadlock. A broadcast occupies the device
until every rank has joined it, and so does every collective of the forward. If the two are launched
on streams of their own, each rank's device takes up whichever is ready first, and two ranks that
choose differently wait for each other for ever. Launched on one stream, by the thread that launches
the forward, their order is that of the program, the same on every rank. So `forward_stream`, the
default, needs no gate that holds the forward until everything is in place, and a layer is exchanged
right before the forward needs it. `side_stream` enqueues all at once, on a stream of its own, and
pays for it with just that gate.
"""

from kvburst.exchange.channel import Channel, GroupChannel, Pending
from kvburst.exchange.shard import RankShard

__all__ = ["Channel", "GroupChannel", "Pending", "RankShard"]
