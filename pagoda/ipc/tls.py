# SPDX-License-Identifier: Apache-2.0
"""TLS of servers and clients: 1.2 and later, with the ciphers that Python's `ssl` takes by default."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagoda.errors import ConfigError


@dataclass(frozen=True)
class TlsFiles:
    """Files in the PEM format, and the flags that named them."""

    certificate: Path | None
    """A certificate, and behind it those that lead to its authority."""
    key: Path | None
    """The key of the certificate; None if it is in the file of the certificate."""
    authorities: Path | None
    """Certificates of the authorities by which others are known."""
    flags: tuple[str, str, str]

    @property
    def paths(self) -> Sequence[Path]:
        return [path for path in (self.certificate, self.key, self.authorities) if path is not None]

    def check(self) -> None:
        """Raises ConfigError: there is a key without a certificate."""
        if self.key is not None and self.certificate is None:
            raise ConfigError(f"{self.flags[1]} needs {self.flags[0]}.")

    def load(self, context: ssl.SSLContext) -> None:
        """Raises ConfigError: a file cannot be used; the sentence names the flag."""
        certificate_flag, key_flag, authorities_flag = self.flags
        if self.certificate is not None:
            try:
                # Without a password OpenSSL would ask for it on the terminal.
                context.load_cert_chain(self.certificate, self.key, password="")
            except (OSError, ValueError) as error:  # errors of OpenSSL are OSErrors
                also = "" if self.key is None else f", or {key_flag}: {self.key},"
                problem = _reason(error)
                raise ConfigError(
                    f"{certificate_flag}: {self.certificate}{also} cannot be used ({problem})."
                ) from None
        if self.authorities is not None:
            try:
                context.load_verify_locations(self.authorities)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"{authorities_flag}: {self.authorities} cannot be used ({_reason(error)})."
                ) from None


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).lower().replace("_", " ")
    return getattr(error, "strerror", None) or str(error)


class ServerTls:
    """The certificate of a server, which may change while it runs; with authorities, clients need one too."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises ConfigError: a file cannot be used, or there is no certificate."""
        files.check()
        if files.certificate is None:
            raise ConfigError(f"{files.flags[2]} needs {files.flags[0]}.")
        self._files = files
        self.context = self._current = self._read()
        """The context to listen with."""
        # A handshake asks for the certificate by name, or without one. It is answered with what was read last, as
        # a whole; connections that are there keep what they began with.
        self.context.sni_callback = self._choose

    @property
    def paths(self) -> Sequence[Path]:
        return self._files.paths

    def reload(self) -> None:
        """Reads the files again, for connections to come. Raises ConfigError: as at first; what was read stays."""
        self._current = self._read()

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _: ssl.SSLContext) -> None:
        connection.context = self._current

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
        # A ticket would let in clients that were known by authorities of before.
        context.num_tickets = 0
        context.set_alpn_protocols(["http/1.1"])
        self._files.load(context)
        if self._files.authorities is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            # Clients of TLS 1.2 could resume a session that authorities of before let in.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Trusts the authorities of the files, or without them those of the machine, and shows the certificate if the
    server asks for one. Raises ConfigError: a file cannot be used."""
    files.check()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if files.authorities is None:
        context.load_default_certs()
    files.load(context)
    return context
