"""A prefix cache over two tiers: example code, after the rules of SGLang's radix cache.

A node holds the pages of a stretch of content. Its pages are on the device, on the host or on both.
A node on the device has its parent there too, and so has one on the host. What was computed is
backed up at once (write-through), so that a leaf that leaves the device stays on the host. On both
tiers the least recently used leaf goes first, and a node goes as a whole.

The cache decides and a `Mover` moves. A request holds a lock on the path that it uses, and the
cache one on what is being backed up: locked nodes stay on the device.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvburst.replay.movers import Mover


class Node:
    """A stretch of pages: what they hold, and where. ``device`` and ``host`` are page ids, or None
    where the tier has no copy. Locks count for the node and all its ancestors."""

    __slots__ = ("children", "contents", "device", "host", "locks", "parent")

    def __init__(
        self, parent: "Node | None", contents: list[int], device: list[int] | None
    ) -> None:
        self.parent = parent
        self.contents = contents
        self.device = device
        self.host: list[int] | None = None
        self.children: dict[int, Node] = {}
        self.locks = 0

    def __len__(self) -> int:
        return len(self.contents)


@dataclass(frozen=True)
class Match:
    """The longest cached prefix of some contents: whole nodes, and ``last`` pages of the last one.

    Valid until the cache changes.
    """

    path: tuple[Node, ...]
    last: int
    device_pages: int
    host_pages: int
    """Of those that are on the host only."""
    evictable_pages: int
    """Of ``device_pages``, as the cache counts them: they cannot make room for the rest."""


@dataclass(frozen=True)
class Claim:
    """A prefix in use: locked at ``node`` until released; all its ``pages`` are on the device, or
    will be when the load that the cache has queued is done."""

    node: Node
    pages: list[int]


class PrefixCache:
    """Decides which pages are kept where, and which make room."""

    def __init__(self, mover: Mover) -> None:
        self.evictable_pages = 0
        """On the device, in nodes that nobody has locked."""
        self._mover = mover
        self._root = Node(None, [], [])
        self._root.host = []
        # Least recently used first, children before their parents.
        self._on_device: OrderedDict[Node, None] = OrderedDict()
        self._only_on_host: OrderedDict[Node, None] = OrderedDict()
        self._to_back_up: list[Node] = []
        self._backing_up: list[Node] = []

    # --- finding -------------------------------------------------------------------------

    def match(self, contents: Sequence[int]) -> Match:
        """Changes nothing, not even what was used last."""
        path = []
        device = host = evictable = last = at = 0
        node = self._root
        while at < len(contents):
            child = node.children.get(contents[at])
            if child is None:
                break
            last = _common(child.contents, contents, at)
            path.append(child)
            if child.device is None:
                host += last
            else:
                device += last
                evictable += last if child.locks == 0 else 0
            at += last
            if last < len(child):
                break
            node = child
        return Match(tuple(path), last, device, host, evictable)

    def claim(self, match: Match) -> Claim:
        """Locks the match, and queues a load of what is on the host only."""
        path = list(match.path)
        if path and match.last < len(path[-1]):
            path[-1] = self._split(path[-1], match.last)
        node = path[-1] if path else self._root
        on_device = [each for each in path if each.device is not None]
        self._lock(on_device[-1] if on_device else self._root)
        self._load([each for each in path if each.device is None])
        self._lock(node)
        self._unlock(on_device[-1] if on_device else self._root)
        self._touch(node)
        return Claim(node, [page for each in path for page in _on_device(each)])

    def _load(self, nodes: list[Node]) -> None:
        if not nodes:
            return
        self.make_room(sum(len(node) for node in nodes))
        pages = self._mover.load([page for node in nodes for page in _on_host(node)])
        for node, part in _dealt(nodes, pages):
            node.device = part
            self.evictable_pages += len(node)
            self._on_device[node] = None
            del self._only_on_host[node]

    # --- keeping -------------------------------------------------------------------------

    def insert(self, claim: Claim, contents: Sequence[int], pages: Sequence[int]) -> Claim:
        """The pages of a request become the cache's; gives back the claim on all of them.

        The claim's own pages come first. A page that the cache has already, from another request,
        takes the place of the request's, which is freed. What is new will be backed up.
        """
        node, at = self._root, 0
        while at < len(contents):
            child = node.children.get(contents[at])
            if child is None:
                child = Node(node, list(contents[at:]), list(pages[at:]))
                node.children[contents[at]] = child
                self._on_device[child] = None
                self.evictable_pages += len(child)
            else:
                same = _common(child.contents, contents, at)
                if same < len(child):
                    child = self._split(child, same)
                self._merge(child, list(pages[at : at + same]))
            at += len(child)
            node = child
        self._lock(node)
        self._unlock(claim.node)
        self._touch(node)
        if any(each.host is None for each in self._path(node)):
            self._lock(node)
            self._to_back_up.append(node)
        return Claim(node, [page for each in self._path(node) for page in _on_device(each)])

    def _merge(self, node: Node, pages: list[int]) -> None:
        if node.device is None:
            node.device = pages
            self.evictable_pages += len(node)
            self._on_device[node] = None
            del self._only_on_host[node]
        elif node.device != pages:
            held = set(node.device)
            self._mover.free_device([page for page in pages if page not in held])

    def release(self, claim: Claim) -> None:
        self._unlock(claim.node)

    # --- backing up ----------------------------------------------------------------------

    def back_up(self) -> None:
        """Backs up what was inserted since the last time, as one burst; as much as the host takes.

        Its pages stay locked until `finish_backups`.
        """
        missing: dict[Node, None] = {}
        for end in self._to_back_up:
            missing.update((node, None) for node in self._path(end) if node.host is None)
        self._make_host_room(sum(len(node) for node in missing))
        room = self._mover.free_host_pages
        chosen: dict[Node, None] = {}
        for node in missing:
            assert node.parent is not None
            parent_is_there = node.parent.host is not None or node.parent in chosen
            if parent_is_there and len(node) <= room:
                chosen[node] = None
                room -= len(node)
        if chosen:
            pages = self._mover.write([page for node in chosen for page in _on_device(node)])
            for node, part in _dealt(chosen, pages):
                node.host = part
        self._backing_up += self._to_back_up
        self._to_back_up = []

    def finish_backups(self) -> None:
        """The mover has finished all backups."""
        for node in self._backing_up:
            self._unlock(node)
        self._backing_up = []

    # --- making room ---------------------------------------------------------------------

    def make_room(self, pages: int) -> None:
        """Evicts from the device until so many pages are free. There must be as many that are free
        or evictable."""
        while self._mover.free_device_pages < pages:
            self._evict_from_device(next(self._device_leaves()))

    def _device_leaves(self) -> Iterator[Node]:
        for node in self._on_device:
            if node.locks == 0 and all(c.device is None for c in node.children.values()):
                yield node

    def _evict_from_device(self, node: Node) -> None:
        self._mover.free_device(_on_device(node))
        node.device = None
        self.evictable_pages -= len(node)
        del self._on_device[node]
        if node.host is None:
            self._remove(node)
        else:
            self._only_on_host[node] = None

    def _make_host_room(self, pages: int) -> None:
        while self._mover.free_host_pages < pages:
            leaf = next((node for node in self._only_on_host if not node.children), None)
            if leaf is None:
                return
            self._mover.free_host(_on_host(leaf))
            del self._only_on_host[leaf]
            self._remove(leaf)

    def _remove(self, leaf: Node) -> None:
        assert leaf.parent is not None
        assert not leaf.children
        del leaf.parent.children[leaf.contents[0]]

    # --- the tree ------------------------------------------------------------------------

    def nodes(self) -> Iterable[Node]:
        """All, in no particular order."""
        return [*self._on_device, *self._only_on_host]

    def _path(self, node: Node) -> list[Node]:
        """From below the root down to the node."""
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def _split(self, node: Node, at: int) -> Node:
        """Cuts a node in two and returns the upper one; whoever knows the node holds the lower."""
        assert node.parent is not None
        upper = Node(node.parent, node.contents[:at], None)
        upper.locks = node.locks
        upper.children[node.contents[at]] = node
        node.parent.children[upper.contents[0]] = upper
        node.parent = upper
        node.contents = node.contents[at:]
        if node.device is not None:
            upper.device, node.device = node.device[:at], node.device[at:]
        if node.host is not None:
            upper.host, node.host = node.host[:at], node.host[at:]
        (self._only_on_host if upper.device is None else self._on_device)[upper] = None
        return upper

    def _touch(self, node: Node) -> None:
        for each in reversed(self._path(node)):
            self._on_device.move_to_end(each)

    def _lock(self, node: Node) -> None:
        for each in self._path(node):
            if each.locks == 0:
                self.evictable_pages -= len(each)
            each.locks += 1

    def _unlock(self, node: Node) -> None:
        for each in self._path(node):
            each.locks -= 1
            if each.locks == 0:
                self.evictable_pages += len(each)


def _on_device(node: Node) -> list[int]:
    assert node.device is not None
    return node.device


def _on_host(node: Node) -> list[int]:
    assert node.host is not None
    return node.host


def _dealt(nodes: Iterable[Node], pages: list[int]) -> Iterator[tuple[Node, list[int]]]:
    """To each node its part of the pages, in order."""
    at = 0
    for node in nodes:
        yield node, pages[at : at + len(node)]
        at += len(node)


def _common(a: Sequence[int], b: Sequence[int], start: int) -> int:
    """How far `a` agrees with `b` from `start` on."""
    length = min(len(a), len(b) - start)
    if a[:length] == b[start : start + length]:
        return length
    return next(i for i in range(length) if a[i] != b[start + i])
