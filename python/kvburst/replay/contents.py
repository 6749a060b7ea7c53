"""Ids for what the pages of a request hold: equal ids, equal bytes."""

from kvburst.replay.trace import BLOCK_TOKENS, Request


def page_contents(request: Request, number: int, page_size: int) -> list[int]:
    """One id for each whole page of the request's input and output.

    A page of the input is known by its block's hash id and its place in the block, so that equal
    prefixes have equal pages. What was generated is the request's alone: ids below 0, made of its
    ``number``. ``page_size`` divides the trace's blocks of 512 tokens.
    """
    a_block = BLOCK_TOKENS // page_size
    known = request.input_length // page_size
    pages = request.tokens // page_size
    contents = [
        hash_id * a_block + page
        for hash_id in request.hash_ids[: -(-known // a_block)]
        for page in range(a_block)
    ]
    return contents[:known] + [-(number << 32) - page - 1 for page in range(known, pages)]


def leading_pages_seen(request: Request, seen: set[int], page_size: int) -> int:
    """How many whole pages of the input, from its front on, are in blocks of earlier requests."""
    blocks = 0
    while blocks < len(request.hash_ids) and request.hash_ids[blocks] in seen:
        blocks += 1
    return min(blocks * BLOCK_TOKENS, request.input_length) // page_size
