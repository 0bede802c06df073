"""TLS between processes of one cluster that meet over TCP: both ends show a certificate.

Whoever has a certificate of the cluster's CA is of the cluster. It holds one DNS name that all have
(`internal_tls.name`), since addresses, such as a pod's, are new with each life. The files are read
again where they have changed: new connections get the new ones, open ones stay.
"""

import threading
from pathlib import Path
from typing import Any, Self

import grpc
import structlog

from core import rpc
from core.config import InternalTlsConfig
from core.errors import ConfigError
from core.pem import NamedFile, Pem, file_version, read_pem


class InternalTls:
    """One process's certificate, for both ends. Raises ConfigError where the files will not do."""

    def __init__(self, config: InternalTlsConfig) -> None:
        self._files = [
            NamedFile(setting=f"internal_tls.{name}", path=path)
            for name in ("cert_file", "key_file", "ca_file")
            if (path := getattr(config, name)) is not None
        ]
        self._name = config.name
        # gRPC asks for a server's certificate on threads of its own.
        self._lock = threading.Lock()
        self._version = self._version_now()
        self._pem = read_pem(*self._files)
        self._told = self._pem  # to the server
        self.server = grpc.dynamic_ssl_server_credentials(
            _as_served(self._pem), self._news, require_client_authentication=True
        )

    @classmethod
    def of(cls, config: InternalTlsConfig) -> Self | None:
        """None where none is configured."""
        return None if config.cert_file is None else cls(config)

    def channel(self, address: str) -> grpc.aio.Channel:
        """A channel to a process of this cluster, at a TCP address."""
        with self._lock:
            pem = self._now()
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
        name = ("grpc.ssl_target_name_override", self._name)
        return grpc.aio.secure_channel(address, credentials, options=[*rpc.OPTIONS, name])

    def _news(self) -> Any:
        """Called at each connection to the server. None: nothing has changed."""
        with self._lock:
            pem = self._now()
            if pem is self._told:
                return None
            self._told = pem
        return _as_served(pem)

    def _now(self) -> Pem:
        """What the files hold. Where that will not do, what they held before."""
        version = self._version_now()
        if version != self._version:
            self._version = version
            log = structlog.get_logger()
            try:
                self._pem = read_pem(*self._files)
            except ConfigError as error:  # perhaps half of them are in place
                log.error("certificates_not_read", reason=error.message)
            else:
                log.info("certificates_read")
        return self._pem

    def _version_now(self) -> list[tuple[int, ...]]:
        return [file_version(Path(file.path)) for file in self._files]


def _as_served(pem: Pem) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(pem.key, pem.cert)], root_certificates=pem.ca
    )
