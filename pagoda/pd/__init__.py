"""Prefill/decode handoff: one engine computes a prompt, another takes over its KV and goes on.

    messages    what the two engines say to each other
    sources     which answers to "where is it" are to be believed
    links       an engine's ways to others: a door, peers, or both
    leases      prefill: KV that is held for others, and until when
    door        prefill: the socket at which others ask
    holder      prefill: what they are answered
    peers       decode: the sockets to engines that hold KV
    holders     decode: what is known of those engines, and patience with them
    fetch       decode: one request whose KV is fetched
    connector   decode: `KVConnector` over them; loads KV as it is computed
    transport/  in workers: how the bytes go

The decode side pulls. The engines agree about which blocks and when; the workers copy them, each rank what it
needs from whichever ranks have it.
"""
