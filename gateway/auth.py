"""Tells by a request's API key, or its client's certificate, who its caller is."""

import asyncio
import hashlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import structlog

from core.api_keys import Entry, KeyFile, TenantEntry, digest_of
from core.config import GatewayConfig
from core.errors import ConfigError, Unauthenticated
from core.pem import file_version
from gateway.caller import ANONYMOUS, Caller
from gateway.certificates import caller_by_default
from gateway.limits import Quota, Resource

_LOOK_EVERY_S = 2.0
_BEARER = "bearer"


class Authenticator(Protocol):
    """Whatever knows callers."""

    # Whether clients show certificates, so that `names` tells who a caller without a key is.
    knows_certificates: bool

    def caller(
        self, authorization: str | None, api_key: str | None, names: tuple[str, ...] = ()
    ) -> Caller:
        """By the `Authorization` header (Bearer), else by `api-key`, as Azure's clients send it.

        Where there is neither, by the `names` in the client's certificate. Raises Unauthenticated.
        """
        ...

    async def watch(self) -> None:
        """Keeps up with changes until cancelled."""
        ...


def authenticator_of(config: GatewayConfig) -> Authenticator:
    """Raises ConfigError where the file of keys will not do."""
    certificates = config.tls_client_ca_file is not None
    if config.api_keys_file is None:
        return Everybody(knows_certificates=certificates)
    return KeyRing(Path(config.api_keys_file), knows_certificates=certificates)


class Everybody:
    """Where no keys are configured, nobody is asked for one: clients send some anyway.

    Each name of a certificate is a tenant then, else all callers are one.
    """

    def __init__(self, *, knows_certificates: bool = False) -> None:
        self.knows_certificates = knows_certificates

    def caller(
        self, authorization: str | None, api_key: str | None, names: tuple[str, ...] = ()
    ) -> Caller:
        """See Authenticator.caller."""
        return caller_by_default(names) if self.knows_certificates else ANONYMOUS

    async def watch(self) -> None:
        """See Authenticator.watch. There is nothing to watch."""


class KeyRing:
    """The keys of a file, and the certificates whose owners it names.

    A key is found by a hash under a secret of this process: how long a look-up takes depends on
    bits that no caller can know or choose, so time tells nothing of the keys.
    """

    def __init__(self, path: Path, *, knows_certificates: bool = False) -> None:
        self.knows_certificates = knows_certificates
        self._path = path
        self._secret = secrets.token_bytes(32)
        self._version = file_version(path)
        self._callers, self._by_name = self._read()

    def caller(
        self, authorization: str | None, api_key: str | None, names: tuple[str, ...] = ()
    ) -> Caller:
        """See Authenticator.caller."""
        key = presented(authorization, api_key)
        if key is None:
            for name in names:
                if (known := self._by_name.get(name)) is not None:
                    return known
            certified = "; the client's certificate is nobody's that is known" if names else ""
            raise Unauthenticated(
                "no API key: send one as `Authorization: Bearer KEY`, or as `api-key: KEY`"
                + certified
            )
        caller = self._callers.get(self._blinded(digest_of(key)))
        if caller is None:
            raise Unauthenticated("the API key is not valid")
        return caller

    async def watch(self) -> None:
        """See Authenticator.watch. A file that will not do leaves the keys as they were."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Reads the file again if it has changed."""
        version = file_version(self._path)
        if version == self._version:
            return
        self._version = version
        log = structlog.get_logger()
        try:
            self._callers, self._by_name = self._read()
        except ConfigError as error:
            log.error("api_keys_not_read", reason=error.message, keys=len(self._callers))
        else:
            log.info("api_keys_read", keys=len(self._callers))

    def _read(self) -> tuple[dict[bytes, Caller], dict[str, Caller]]:
        file = KeyFile.read(self._path)
        keys = {
            self._blinded(entry.digest): _caller_of(entry, file.tenants.get(entry.tenant))
            for entry in file.keys
        }
        names = {
            entry.certificate: _caller_of(entry, file.tenants.get(entry.tenant))
            for entry in file.clients
        }
        return keys, names

    def _blinded(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=32).digest()


def presented(authorization: str | None, api_key: str | None) -> str | None:
    """The key that a request brings."""
    if authorization is None:
        return api_key or None
    scheme, _, key = authorization.strip().partition(" ")
    return key.strip() or None if scheme.lower() == _BEARER else None


def _caller_of(entry: Entry, tenant: TenantEntry | None) -> Caller:
    return Caller(
        key_id=entry.id,
        tenant=entry.tenant,
        max_priority=entry.max_priority,
        models=None if entry.models is None else frozenset(entry.models),
        quotas=(
            *_quotas(f"{entry.kind} {entry.id}", entry),
            *(_quotas(f"tenant {entry.tenant}", tenant) if tenant is not None else ()),
        ),
    )


def _quotas(subject: str, entry: Entry | TenantEntry) -> Iterator[Quota]:
    for resource, per_minute in (
        (Resource.REQUESTS, entry.requests_per_minute),
        (Resource.TOKENS, entry.tokens_per_minute),
    ):
        if per_minute is not None:
            yield Quota(subject=subject, resource=resource, per_minute=per_minute)
