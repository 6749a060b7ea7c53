"""Link models with public numbers behind them, for the simulated link of the ``host`` device.

A link decides what a copy costs: a price for the thread that issues it, and bandwidth. The numbers
are other people's measurements, named beside each preset; whatever is computed with them is
simulated, and every place that prints it has to say so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvburst._core import LinkModel

LinkName = Literal["h100", "h100-batch"]


@dataclass(frozen=True)
class Link:
    """A host-device link: microseconds a copy, gigabytes (10^9 bytes) a second, queue depth.

    ``source`` says where the numbers come from, in words fit for a table's footnote.
    """

    name: LinkName
    gigabytes_per_second: float
    issue_us: float
    tall_issue_us: float
    queue_depth: int
    source: str

    def model(self, byte_scale: float = 1.0) -> LinkModel:
        """The model a ``HostDevice`` takes; it charges ``byte_scale`` bytes for a byte moved."""
        return LinkModel(
            gigabytes_per_second=self.gigabytes_per_second,
            issue_us=self.issue_us,
            tall_issue_us=self.tall_issue_us,
            queue_depth=self.queue_depth,
            byte_scale=byte_scale,
        )


# Public figures of one link, and two of what a copy costs the thread that issues it.
LINKS: Mapping[LinkName, Link] = {
    "h100": Link(
        name="h100",
        gigabytes_per_second=50.0,
        issue_us=2.3,
        tall_issue_us=3.0,
        queue_depth=1024,
        source="H100 over PCIe: 2.3 us a copy, 3 us a tall one, 50 GB/s, 1,024 copies queued",
    ),
    "h100-batch": Link(
        name="h100-batch",
        gigabytes_per_second=50.0,
        issue_us=0.5,
        tall_issue_us=0.5,
        queue_depth=1024,
        source="H100 over PCIe, batch calls: 0.5 us a copy, 50 GB/s, 1,024 copies queued",
    ),
}


@dataclass(frozen=True)
class ExchangeLink:
    """A modelled link between ranks: gigabytes (10^9 bytes) a second, and microseconds that each
    collective takes beside its bytes."""

    gigabytes_per_second: float
    collective_us: float
    source: str

    def microseconds(self, nbytes: float) -> float:
        """That one broadcast of so many bytes takes."""
        return self.collective_us + nbytes / self.gigabytes_per_second / 1e3


# Not measured here: a round figure below NVLink 4's 450 GB/s each way, and one for a small NCCL
# collective.
NVLINK = ExchangeLink(
    gigabytes_per_second=300.0,
    collective_us=10.0,
    source="NVLink: 300 GB/s, 10 us a collective",
)
