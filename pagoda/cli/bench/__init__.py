"""`pagoda bench`: load on servers, throughput without one, and right answers counted."""
