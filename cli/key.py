"""`tandem key`: makes API keys. The file that they belong in is described in `core.api_keys`."""

import secrets
import sys
from typing import Annotated

import typer

app = typer.Typer(help="Make API keys.", no_args_is_help=True, rich_markup_mode="rich")


@app.command(
    epilog="[bold]Examples[/bold]\n\n"
    "  tandem key new --tenant acme >> keys.toml\n\n"
    "  tandem key new --tenant acme --id ci --requests-per-minute 60 >> keys.toml\n\n"
    "The entry is printed on stdout and the key on stderr, so that the key stays out of the file. "
    "The server is told where the file is by gateway.api_keys_file, and sees changes by itself."
)
def new(
    tenant: Annotated[str, typer.Option(help="Whose key it is.")],
    id: Annotated[str | None, typer.Option(help="The key's name in logs. Default: random.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Default: unbounded.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Prompts' and answers'. Default: unbounded.")
    ] = None,
    max_priority: Annotated[int, typer.Option(help="The highest it may ask for.")] = 0,
    model: Annotated[
        list[str] | None, typer.Option(help="A model it may use; may be repeated. Default: all.")
    ] = None,
) -> None:
    """Make a key. It is shown once and stored nowhere; its entry holds a hash of it."""
    from pydantic import ValidationError

    from core.api_keys import KeyEntry, entry_toml, hash_of, new_key
    from core.errors import ConfigError

    key = new_key()
    try:
        entry = KeyEntry(
            id=f"{tenant[:32]}-{secrets.token_hex(4)}" if id is None else id,
            hash=hash_of(key),
            tenant=tenant,
            max_priority=max_priority,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            models=tuple(model) if model else None,
        )
    except ValidationError as error:
        # The id that is made of a bad tenant is bad as well: the tenant is what to mend.
        first = error.errors()[-1]
        option = str(first["loc"][0]).replace("_", "-").removesuffix("s") if first["loc"] else ""
        raise ConfigError(f"--{option}: {first['msg']}") from None
    print(f"\n{entry_toml(entry)}", end="")
    print(f"The key, which is not shown again:\n{key}", file=sys.stderr)
