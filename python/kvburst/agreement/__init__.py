"""Ranks agree on what each of them retires, step by step, without waiting for each other.

`Agreement` says how; its reducer counts what is ready here (`counters`), takes the minimum over
ranks (`transports`), and hands out what every rank takes now.
"""

from kvburst.agreement.agreement import Agreement
from kvburst.agreement.board_group import BoardConnection, connect_board, host_identity
from kvburst.agreement.choice import choose_transport
from kvburst.agreement.counters import AckCounter, ListCounter, QueueCounter, ReadyCounter
from kvburst.agreement.errors import AgreementError, Failure
from kvburst.agreement.groups import (
    AgreementGroups,
    GroupPeers,
    LonePeers,
    Peers,
    make_groups,
    require_same,
)
from kvburst.agreement.reducer import AckReducer, AgreementStats, AgreementStep, payload_length
from kvburst.agreement.stages import PipelineStages, Stages
from kvburst.agreement.transports import (
    Blocking,
    Board,
    Collective,
    GroupMin,
    Pipelined,
    Transport,
    TransportName,
)

__all__ = [
    "AckCounter",
    "AckReducer",
    "Agreement",
    "AgreementError",
    "AgreementGroups",
    "AgreementStats",
    "AgreementStep",
    "Blocking",
    "Board",
    "BoardConnection",
    "Collective",
    "Failure",
    "GroupMin",
    "GroupPeers",
    "ListCounter",
    "LonePeers",
    "Peers",
    "PipelineStages",
    "Pipelined",
    "QueueCounter",
    "ReadyCounter",
    "Stages",
    "Transport",
    "TransportName",
    "choose_transport",
    "connect_board",
    "host_identity",
    "make_groups",
    "payload_length",
    "require_same",
]
