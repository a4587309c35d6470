# SPDX-License-Identifier: Apache-2.0
"""Certificates of an authority that tests make, in files."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme

from pagoda.ipc.tls import TlsFiles, client_context

FLAGS = ("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs")


class Certificates:
    """An authority, and a certificate of it for 127.0.0.1, ::1 and localhost with its key."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self.certificate = directory / "certificate.pem"
        self.key = directory / "key.pem"
        self.authority = directory / "authority.pem"
        self._authority = trustme.CA()
        self._authority.cert_pem.write_to_path(self.authority)
        self.renew()

    def renew(self) -> None:
        """Puts another certificate of the same authority into the files."""
        made = self._authority.issue_cert("127.0.0.1", "::1", "localhost")
        made.private_key_pem.write_to_path(self.key)
        self.key.chmod(0o600)
        for index, part in enumerate(made.cert_chain_pems):
            part.write_to_path(self.certificate, append=index > 0)

    def files(self, *, authorities: bool = True) -> TlsFiles:
        """The files of a server, or of a client that shows the certificate."""
        return TlsFiles(self.certificate, self.key, self.authority if authorities else None, FLAGS)

    def client_context(self, *, shows: bool = True) -> ssl.SSLContext:
        """Trusts the authority, and shows the certificate if it is asked for one."""
        if shows:
            return client_context(self.files())
        return client_context(TlsFiles(None, None, self.authority, FLAGS))
