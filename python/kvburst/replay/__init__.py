"""A public request trace decides which pages move: ``kvburst replay``.

``trace`` reads the requests, ``server`` takes them through chunked prefill and decode over
``prefix_cache``, which decides what is kept where; ``movers`` move the pages, as bytes or only as
numbers; ``page_bytes`` says what every page must hold; ``burst_log`` counts the copies and
``recording`` keeps the bursts for tests and benchmarks. ``sharing`` replays a trace over host tiers
of the same bytes, shared between ranks and not.

The cache and the server are example code beside the library: small, of one thread, and true to
SGLang in the order in which pages are taken and given back, which is what scatters a pool.
"""
