"""Faults that tests inject into the processes of a server; see docs/reliability.md."""
