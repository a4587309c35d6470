"""The command line: one file per command, options that several share in `options`."""
