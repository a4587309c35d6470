"""Conformance suite of backends: `pagoda backend check NAME`, and its checks for tests of one."""
