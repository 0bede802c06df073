"""The file of API keys: who may call, and how much. Keys themselves are never in it.

    [tenants.acme]                      # optional: bounds that all keys of the tenant share
    tokens_per_minute = 200000

    [[keys]]
    id = "acme-ci"                      # stands in logs
    hash = "sha256:9f86d0…"             # of the key's bytes
    tenant = "acme"                     # tenants never share prefix-cache entries
    max_priority = 0                    # the highest that its requests may ask for
    requests_per_minute = 60            # none: unbounded
    tokens_per_minute = 20000
    models = ["smollm2-135m-instruct"]  # none: every model

    [[clients]]                         # optional, with gateway.tls_client_ca_file
    id = "acme-batch"
    certificate = "batch.acme.example"  # a name in it: the subject's CN, or an alternative name
    tenant = "acme"                     # and what a key may have

A key is 256 random bits, so a plain hash of it cannot be searched, and no salt is needed.
"""

import hashlib
import json
import secrets
import tomllib
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from core.errors import ConfigError

KEY_PREFIX = "tdm-"
_HASH_NAME = "sha256:"
# Names stand in logs, headers and messages.
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}$")]
_Rate = Annotated[int | None, Field(ge=1, le=10**12)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TenantEntry(_Table):
    """What all keys of one tenant share."""

    requests_per_minute: _Rate = None
    tokens_per_minute: _Rate = None


class Entry(_Table):
    """What one caller may do, however it shows who it is."""

    kind: ClassVar[str]
    id: _Name
    tenant: _Name
    max_priority: int = 0
    requests_per_minute: _Rate = None
    tokens_per_minute: _Rate = None
    models: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None


class KeyEntry(Entry):
    """One key."""

    kind: ClassVar[str] = "key"
    hash: str = Field(pattern=rf"^{_HASH_NAME}[0-9a-f]{{64}}$", repr=False)

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.hash.removeprefix(_HASH_NAME))


class ClientEntry(Entry):
    """Whoever shows a certificate with this name, and no key."""

    kind: ClassVar[str] = "client"
    certificate: str = Field(min_length=1, max_length=1024)


class KeyFile(_Table):
    """The whole file."""

    tenants: dict[_Name, TenantEntry] = {}
    keys: Annotated[tuple[KeyEntry, ...], Field(strict=False)] = ()
    clients: Annotated[tuple[ClientEntry, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _each_key_once(self) -> Self:
        entries: tuple[Entry, ...] = (*self.keys, *self.clients)
        for what in ("id", "hash", "certificate"):
            seen: set[str] = set()
            for entry in entries:
                value = getattr(entry, what, None)
                if value in seen:
                    raise PydanticCustomError(
                        "twice",
                        "the {what} of {kind} {id} stands twice",
                        {"what": what, "kind": entry.kind, "id": entry.id},
                    )
                if value is not None:
                    seen.add(value)
        return self

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ConfigError that names the file and the field, and quotes no hash."""
        try:
            return cls.model_validate(tomllib.loads(path.read_text()))
        except OSError as error:
            raise ConfigError(
                f"gateway.api_keys_file: cannot read {path}: {error.strerror}"
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not TOML: {error}") from None
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"{path}: {field + ': ' if field else ''}{first['msg']}") from None


def new_key() -> str:
    """A key that nobody can guess."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> bytes:
    """What is stored of a key. Any string is a key: one made elsewhere serves as well."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def hash_of(key: str) -> str:
    """The `hash` of a key's entry."""
    return _HASH_NAME + digest_of(key).hex()


def entry_toml(entry: KeyEntry) -> str:
    """The entry as it stands in the file."""
    lines = ["[[keys]]"]
    for name, value in entry.model_dump(mode="json", exclude_defaults=True).items():
        # Strings and lists of them are written in TOML as in JSON, but for one character.
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        lines.append(f"{name} = {text}")
    return "\n".join(lines) + "\n"
