"""`pagoda bench`: load on a server, throughput without one, and right answers counted."""
