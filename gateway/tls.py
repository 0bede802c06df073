"""TLS for both public servers, from one set of files, which are read again when they change.

A renewed certificate serves new connections; those that are open keep theirs.
"""

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
import structlog

from core.config import GatewayConfig
from core.errors import ConfigError
from core.pem import NamedFile, file_version, read_pem

_LOOK_EVERY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Material:
    """What the files held: as Python's ssl has it, and as gRPC has it."""

    context: ssl.SSLContext
    certificates: grpc.ServerCertificateConfiguration


class Tls:
    """A certificate and its key, and the CA of clients where they must show certificates, too.

    Raises ConfigError that names setting and file where they will not do.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._version = self._version_now()
        self._material = _read_all(config)
        self._told = self._material  # to gRPC
        self.http = self._material.context
        # Asked for at each connection, with or without a server's name.
        self.http.sni_callback = self._choose
        self.grpc = grpc.dynamic_ssl_server_credentials(
            self._material.certificates,
            self._news,
            require_client_authentication=config.tls_client_ca_file is not None,
        )

    @classmethod
    def of(cls, config: GatewayConfig) -> Self | None:
        """None where TLS is not configured."""
        return None if config.tls_cert_file is None else cls(config)

    async def watch(self) -> None:
        """Keeps up with the files until cancelled. Files that will not do leave all as it was."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Reads the files again if one has changed."""
        version = self._version_now()
        if version == self._version:
            return
        self._version = version
        log = structlog.get_logger()
        try:
            self._material = _read_all(self._config)
        except ConfigError as error:  # perhaps half of them are in place: the next change tells
            log.error("certificates_not_read", reason=error.message)
        else:
            log.info("certificates_read")

    def _choose(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        if connection.context is not self._material.context:
            connection.context = self._material.context

    def _news(self) -> Any:
        """Called at each gRPC connection, on a thread of gRPC's. None: nothing has changed."""
        material = self._material
        if material is self._told:
            return None
        self._told = material
        return material.certificates

    def _version_now(self) -> Sequence[tuple[int, ...]]:
        config = self._config
        paths = (config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)
        return [file_version(Path(path)) for path in paths if path is not None]


def _read_all(config: GatewayConfig) -> _Material:
    assert config.tls_cert_file is not None and config.tls_key_file is not None
    ca = config.tls_client_ca_file
    pem = read_pem(
        NamedFile(setting="gateway.tls_cert_file", path=config.tls_cert_file),
        NamedFile(setting="gateway.tls_key_file", path=config.tls_key_file),
        None if ca is None else NamedFile(setting="gateway.tls_client_ca_file", path=ca),
    )
    pem.context.set_alpn_protocols(["http/1.1"])
    certificates = grpc.ssl_server_certificate_configuration(
        [(pem.key, pem.cert)], root_certificates=pem.ca
    )
    return _Material(context=pem.context, certificates=certificates)
