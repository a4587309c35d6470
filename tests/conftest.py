"""For all tests."""

import os

# Read when torch is loaded: its threads sleep when they wait, as in a worker, so tests stay fast on busy machines.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
