# SPDX-License-Identifier: Apache-2.0
"""Prefill/decode disaggregation: one engine computes a prompt, another takes over its KV and goes on.

    messages         messages between the two engines
    transfer_tokens  transfer ids that only engines of the cluster can make
    links            an engine's connections to others
    exporter         prefill: answers to engines that ask for KV
    fetches          decode: what is known of KV that other engines are asked for
    connector        decode: a `KVConnector` over these engines, which loads KV as it is computed
    hooks            what becomes of an engine's requests, told to both
    transport/       in workers: how the bytes go
    worker/          in workers: which bytes go where
    offload          in routers: prompts that another host is to compute
    kv_transfer, bootstrap  in the API: handoffs that proxies arrange

The decode side pulls. The engines agree about which blocks and when; the workers copy them, each rank what it
needs from whichever ranks have it.
"""

from pagoda.kv.connector_plugin import KVConnectorPlugin

CONNECTOR = KVConnectorPlugin(
    engine="pagoda.plugins.disaggregation.hooks:open_engine_links",
    worker="pagoda.plugins.disaggregation.worker.handoff:open_handoff",
    offload="pagoda.plugins.disaggregation.offload:PrefillOffload",
    options="pagoda.plugins.disaggregation.options:HandoffOptions",
)
