"""The ranks that agree: their process groups, and what they tell each other off the hot path."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

import torch.distributed as dist

from kvburst._core import KVBurstError
from kvburst.agreement.errors import AgreementError, first_line

T = TypeVar("T")


class Peers(Protocol):
    """The ranks that agree, this one among them."""

    @property
    def rank(self) -> int: ...
    def exchange(self, item: T) -> Mapping[int, T]:
        """What each rank gave, by rank. Every rank calls it at the same point; blocks.

        Raises AgreementError when a rank is missing.
        """
        ...


@dataclass(frozen=True)
class LonePeers:
    """One rank that agrees with itself."""

    rank: int = 0

    def exchange(self, item: T) -> Mapping[int, T]:
        return {self.rank: item}


class GroupPeers:
    """The ranks that a chain of process groups connects. Ranks are those of the default group.

    groups: for a grid, its rows and its columns. They can move objects on the CPU (gloo). A call is
        bounded by their timeout.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = tuple(groups)
        self.rank = dist.get_rank()

    def exchange(self, item: T) -> Mapping[int, T]:
        found = {self.rank: item}
        for group in self._groups:
            gathered: list[dict[int, T]] = [{} for _ in range(dist.get_world_size(group))]
            try:
                dist.all_gather_object(gathered, found, group=group)
            except RuntimeError as error:
                raise AgreementError(
                    f"not all of {ranks_text(dist.get_process_group_ranks(group))} answered, one "
                    f"has ended or did not come within the group's timeout: {first_line(error)}"
                ) from error
            found = {rank: one for part in gathered for rank, one in part.items()}
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class AgreementGroups:
    """The process groups over which counts are agreed; each moves CPU tensors (gloo).

    tp: ranks of one tensor-parallel group, and of one pipeline stage.
    cp: ranks of one context-parallel group; together with `tp` a grid.
    grid: all ranks of that grid, where such a group exists: one board can then serve it.
    pp: this rank's place in every pipeline stage, in the order of the stages.

    This rank is in each of them; None where there is no such group.
    """

    tp: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None
    grid: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        for name, group in vars(self).items():
            # It would agree with nobody, and nobody would notice.
            if group is not None and dist.get_rank(group) < 0:
                raise KVBurstError(f"{name}: rank {dist.get_rank()} is not one of its ranks")

    @property
    def chain(self) -> tuple[dist.ProcessGroup, ...]:
        """Those whose MINs, one after the other, are the MIN over all ranks of a stage."""
        return tuple(g for g in (self.cp, self.tp) if g is not None and _size(g) > 1)

    @property
    def stages(self) -> dist.ProcessGroup | None:
        """`pp`, where there is more than one stage."""
        return self.pp if self.pp is not None and _size(self.pp) > 1 else None

    def peers(self) -> GroupPeers:
        """The ranks of this stage."""
        return GroupPeers(self.chain)

    def everyone(self) -> GroupPeers:
        """The ranks of all stages."""
        stages = self.stages
        return GroupPeers(self.chain if stages is None else (*self.chain, stages))


def _size(group: dist.ProcessGroup) -> int:
    return dist.get_world_size(group)


def make_groups(
    lists: Sequence[Sequence[int]], *, timeout: float, backend: str = "gloo"
) -> list[dist.ProcessGroup | None]:
    """Create a process group of each list of ranks; None stands for those this rank is not in.

    Creating a group takes every rank of the default group, members or not: all of them call this
    with the same lists, and the groups are created in that order. Lists that differ are refused on
    every rank (AgreementError) before any group is created. timeout: seconds, of each operation on
    the groups.
    """
    if not timeout > 0:
        raise KVBurstError(f"timeout: {timeout} seconds must be more than 0")
    world = GroupPeers([dist.group.WORLD] if dist.group.WORLD is not None else [])
    require_same(world, "ranks of the groups to create", [list(ranks) for ranks in lists])
    size = dist.get_world_size()
    for ranks in lists:
        for rank in ranks:
            if not 0 <= rank < size:
                raise KVBurstError(f"lists: rank {rank} must be 0 to {size - 1}")
    made: list[dist.ProcessGroup | None] = []
    for ranks in lists:
        group = dist.new_group(list(ranks), timedelta(seconds=timeout), backend)
        made.append(group if world.rank in ranks else None)
    return made


def require_same(peers: Peers, what: str, value: object) -> None:
    """Every rank gives its own value of `what`; unless all are the same, every rank raises.

    The AgreementError says which rank has which. Every rank calls this, also one where the feature
    that `value` speaks of is off. Values are compared as text. Blocks until all have called.
    """
    found = peers.exchange(repr(value))
    if len(set(found.values())) > 1:
        raise AgreementError(
            f"{what}: must be the same on every rank, but is {ranks_by_value(found)}",
            ranks=minority(found),
        )


def ranks_by_value(found: Mapping[int, object]) -> str:
    """ "5 on ranks 0, 1; 7 on rank 2"."""
    holders: dict[object, list[int]] = {}
    for rank, value in found.items():
        holders.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in holders.items())


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def minority(found: Mapping[int, object]) -> list[int]:
    """The ranks whose value is not the commonest one; the lowest rank's wins a draw."""
    values = list(found.values())
    common = max(values, key=values.count)
    return [rank for rank, value in found.items() if value != common]
