"""The thread that plays the side stream where a channel blocks: whoever waits for it is told if it
cannot go on."""

from unittest import mock

import pytest
from exchange_helpers import PAGE, make_rank
from exchange_processes import new_channel, run_ranks
from rigs import Blocking

from kvburst import BurstError, HostDevice
from kvburst.exchange.primitive import LayerBroadcast


def breaking(rank: int, ranks: int) -> str:
    """What the forward of this rank is told, where torch has no memory on rank 1."""
    one = make_rank(
        HostDevice(), new_channel(timeout=2), rank=rank, exchange="side_stream", mode="inline"
    )
    stored = one.controller.write(one.device_pages.alloc(PAGE))
    one.controller.ack_write_queue.clear()
    one.controller.load(stored)
    told = []

    def forward() -> None:
        with pytest.raises(BurstError) as error:
            one.forward(one.controller.start_loading())
        told.append(str(error.value))

    send = LayerBroadcast.send if rank == 0 else mock.Mock(side_effect=RuntimeError("no memory"))
    with mock.patch.object(LayerBroadcast, "send", send):
        Blocking(forward).join()
    return told[0]


def test_forwards_are_told_of_an_error_that_nobody_expects_on_the_thread() -> None:
    first, second = run_ranks(2, breaking)
    assert second == "load 0: RuntimeError('no memory')"
    assert first.startswith("load 0: layer 0: broadcast from rank 0: ")
