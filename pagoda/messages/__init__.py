"""Every type that crosses a process boundary: one module for each wire.

    GenerateRequest ─> engine ─> StepPlan ─> worker ─> StepResult ─> engine ─> TokenChunk

All are `msgspec.Struct`s, written as msgpack (`pagoda.ipc.codec`); nothing is pickled. Both ends of a wire
import its module. This package imports nothing of Pagoda but errors, topology and what a trace is.
"""
