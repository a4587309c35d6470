# SPDX-License-Identifier: Apache-2.0
"""`pagoda bench`: load on servers, throughput without one, and right answers counted."""
