# SPDX-License-Identifier: Apache-2.0
"""Endpoint picker of the Gateway API's inference extension: a router's policy for gateways of others.

wire      protocol buffers, as far as the messages here need them
messages  the messages of Envoy's external processing that matter
picker    the host of a request
server    the service over gRPC, and its health
flags     --epp-listen
"""

from pagoda.api.plugin import ApiPlugin
from pagoda.plugins.epp.server import PickerState

API = ApiPlugin(state=PickerState, flags="pagoda.plugins.epp.flags:PickerFlags")
