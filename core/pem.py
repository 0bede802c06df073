"""Certificates in PEM files, read and checked: what will not do is told by setting and file."""

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFile:
    """A file, and the setting that names it."""

    setting: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pem:
    """What the files held, and a server's context that is made of it."""

    cert: bytes
    key: bytes
    ca: bytes | None
    context: ssl.SSLContext


def read_pem(cert: NamedFile, key: NamedFile, ca: NamedFile | None) -> Pem:
    """A certificate and its key, and the CA of peers that must show certificates, too.

    Raises ConfigError that names setting and file where they will not do.
    """
    held, held_key, held_ca = _read(cert), _read(key), None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # An encrypted key must not make the process ask for its password on a terminal.
        context.load_cert_chain(cert.path, key.path, _no_password)
    except (ssl.SSLError, ValueError, OSError) as error:
        raise ConfigError(
            f"{cert.setting}, {key.setting}: {cert.path} and {key.path} are no certificate and "
            f"its unencrypted key in PEM{_reason(error)}"
        ) from None
    if ca is not None:
        held_ca = _read(ca)
        try:
            context.load_verify_locations(cadata=held_ca.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"{ca.setting}: {ca.path} holds no CA certificate in PEM{_reason(error)}"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return Pem(cert=held, key=held_key, ca=held_ca, context=context)


def file_version(path: Path) -> tuple[int, ...]:
    """Changes with the file, also where another takes its place; () where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


def _read(file: NamedFile) -> bytes:
    try:
        return Path(file.path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{file.setting}: cannot read {file.path}: {error.strerror}") from None


def _no_password() -> NoReturn:
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else str(error)
    return f" ({reason.lower().replace('_', ' ')})" if reason else ""
