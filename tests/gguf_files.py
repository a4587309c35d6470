"""The end of writing a GGUF file."""

from __future__ import annotations

from gguf import GGUFWriter


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
