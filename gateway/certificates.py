"""Who the client of a connection is by its certificate, in the names that the certificate has."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from gateway.caller import ANONYMOUS, Caller

# Where the HTTP server puts them for the application: among the extensions of an ASGI scope.
SCOPE_NAMES = "tandem.client_names"
# What a tenant may be called (`core.api_keys`).
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}")


def names_in_ssl(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in what Python's `getpeercert` gives: the subject's common name first."""
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    names = [value for key, value in subject if key == "commonName"]
    names += [value for _, value in certificate.get("subjectAltName", ()) if isinstance(value, str)]
    return tuple(dict.fromkeys(filter(None, names)))


def names_in_grpc(auth_context: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """The same in gRPC's words; none where the client showed no certificate."""
    names = [
        value.decode("utf-8", "replace")
        for key in ("x509_common_name", "x509_subject_alternative_name")
        for value in auth_context.get(key, ())
    ]
    return tuple(dict.fromkeys(filter(None, names)))  # gRPC tells of no name as an empty one


def caller_by_default(names: tuple[str, ...]) -> Caller:
    """Where no file says whose certificates are whose, each name is a tenant of its own.

    A name that no tenant may have is told by its hash: two names never become one tenant.
    """
    name = names[0] if names else ""
    if not _TENANT.fullmatch(name):
        name = "cert-" + hashlib.sha256(name.encode()).hexdigest()[:32]
    return replace(ANONYMOUS, tenant=name)
