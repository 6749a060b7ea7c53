"""Which transport the groups allow."""

import logging

import torch.distributed as dist

from kvburst.agreement.board_group import connect_board
from kvburst.agreement.errors import AgreementError, first_line
from kvburst.agreement.groups import AgreementGroups, ranks_by_value, ranks_text
from kvburst.agreement.transports import (
    Blocking,
    Board,
    GroupMin,
    Pipelined,
    Transport,
    TransportName,
)

_logger = logging.getLogger("kvburst")


def choose_transport(
    wanted: TransportName, groups: AgreementGroups, *, values: int, timeout: float
) -> Transport:
    """What is wanted, or what comes nearest to it here; the same on every rank of every stage.

    "pipelined" needs exactly one collective a step, and no later stages; where it would need more,
    a board takes its place. "board" needs one group that spans all ranks of a stage, on one node;
    elsewhere it becomes "pipelined" where that fits. What is left is "blocking". The log of the
    lowest rank says once what was chosen instead, and why.

    values: of a round. timeout: seconds, of a board (see `Agreement`). Every rank calls this at
    the same point; blocks.
    """
    chain = groups.chain
    collectives = [GroupMin(group) for group in chain]
    if wanted == "blocking" or not collectives:
        return Blocking(collectives)
    reasons = []
    fits_pipeline = len(chain) == 1 and groups.stages is None
    if wanted == "pipelined" and not fits_pipeline:
        there_are = "a group for CP and one for TP" if len(chain) > 1 else "pipeline stages"
        reasons.append(
            f"'pipelined' needs exactly one collective a step, and there are {there_are}"
        )
    if wanted == "board" or not fits_pipeline:
        board = _board(groups, values, timeout)
        if not isinstance(board, str):
            _say(groups, wanted, board, reasons)
            return board
        reasons.append(f"no board: {board}")
    transport = Pipelined(collectives[0]) if fits_pipeline else Blocking(collectives)
    _say(groups, wanted, transport, reasons)
    return transport


def _board(groups: AgreementGroups, values: int, timeout: float) -> Transport | str:
    """A board over all ranks of the stage, if every stage has one; else why not."""
    if len(groups.chain) == 1:
        whole = groups.chain[0]
    elif groups.grid is not None:
        whole = groups.grid
        _check_grid(whole, groups)
    else:
        return "no group spans both CP and TP"
    try:
        connection = connect_board(whole, values=values, timeout=timeout)
    except RuntimeError as error:
        raise AgreementError(
            "board: it was not set up, a rank has ended or did not come within the group's "
            f"timeout: {first_line(error)}"
        ) from error
    for reason in groups.everyone().exchange(connection.reason).values():
        if reason:
            if connection.board is not None:
                connection.board.close()
            return reason
    assert connection.board is not None, "it has no reason not to be there"
    return Board(connection.board, dist.get_process_group_ranks(whole))


def _check_grid(grid: dist.ProcessGroup, groups: AgreementGroups) -> None:
    """Ranks that the board left out would not be heard, and nobody would notice."""
    given = dist.get_process_group_ranks(grid)
    connected = list(groups.peers().exchange(None))
    problem = ""
    if given != connected:
        problem = f"it has {ranks_text(given)}, and cp and tp connect {ranks_text(connected)}"
    wrong = {rank: found for rank, found in groups.everyone().exchange(problem).items() if found}
    if wrong:
        raise AgreementError(f"grid: {ranks_by_value(wrong)}", ranks=list(wrong))


def _say(
    groups: AgreementGroups, wanted: TransportName, chosen: Transport, reasons: list[str]
) -> None:
    everyone = groups.everyone()
    if chosen.name != wanted and everyone.rank == min(everyone.exchange(None)):
        _logger.warning(
            "agreement: '%s' instead of '%s': %s", chosen.name, wanted, "; ".join(reasons)
        )
