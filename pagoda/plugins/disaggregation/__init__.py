# SPDX-License-Identifier: Apache-2.0
"""Prefill/decode handoff: one engine computes a prompt, another takes over its KV and goes on.

    messages         messages between the two engines
    transfer_tokens  transfer ids that only engines of the cluster can make
    links            an engine's connections to others
    exporter         prefill: answers to engines that ask for KV
    fetches          decode: what is known of KV that other engines are asked for
    connector        decode: a `KVConnector` over these engines, which loads KV as it is computed
    transport/       in workers: how the bytes go

The decode side pulls. The engines agree about which blocks and when; the workers copy them, each rank what it
needs from whichever ranks have it.
"""
