"""`tandem scale`: how many workers serve each role, shown and chosen."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import httpx


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        name="scale",
        epilog="[bold]Examples[/bold]\n\n"
        "  tandem scale\n\n"
        "  tandem scale --prefill 1 --decode 3\n\n"
        "  tandem scale --auto\n\n"
        "The cluster must have been started with `tandem serve --elastic`.",
    )(scale)


def scale(
    prefill: Annotated[
        int | None, typer.Option(help="How many workers are to read prompts.")
    ] = None,
    decode: Annotated[int | None, typer.Option(help="How many are to write answers.")] = None,
    auto: Annotated[bool, typer.Option("--auto", help="Let the demand decide again.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Whose workers, where several models are served.")
    ] = None,
    url: Annotated[
        str, typer.Option(help="A scheduler's admin server; one that stands by names the leader's.")
    ] = "http://127.0.0.1:8001",
) -> None:
    """Show who serves which role and what the demand wants; with numbers, choose."""
    chosen = _choice(prefill, decode, auto=auto)
    print(_ask(url, chosen, model))


def _choice(prefill: int | None, decode: int | None, *, auto: bool) -> dict[str, object] | None:
    """The request's body; None: only look."""
    from core.errors import InvalidRequest

    if auto:
        if prefill is not None or decode is not None:
            raise InvalidRequest("--auto takes no numbers beside it", field="--auto")
        return {"auto": True}
    if prefill is None and decode is None:
        return None
    if prefill is None or decode is None:
        missing = "--prefill" if prefill is None else "--decode"
        raise InvalidRequest(f"{missing} is needed as well", field=missing)
    return {"prefill": prefill, "decode": decode}


def _ask(url: str, chosen: Mapping[str, object] | None, model: str | None) -> str:
    """The answer in words. Raises TandemError with one line for a person."""
    import httpx

    from core.errors import InvalidRequest, TandemError, Unavailable

    address = f"{url.rstrip('/')}/scale"
    query = None if model is None else {"model": model}
    try:
        # Proxies of the environment are not asked: the server is at the given address.
        with httpx.Client(timeout=10.0, trust_env=False) as client:
            method = "GET" if chosen is None else "POST"
            ask = client.build_request(method, address, json=chosen, params=query)
            response = _followed(client, client.send(ask))
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise InvalidRequest(f"--url: {url} is not a URL: {error}", field="--url") from error
    except httpx.HTTPError as error:
        raise Unavailable(f"no scheduler at {url}: is it the admin address?") from error
    try:
        found = response.json()
        if response.status_code == httpx.codes.BAD_REQUEST:
            told = found["error"]
            named = {"model": "--model: "}.get(told.get("field"), "")
            raise TandemError(f"{named}{told['message']}")
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise Unavailable(f"{url}: {found['error']['message']}")
        response.raise_for_status()
        return report(found)
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise Unavailable(f"{url} does not answer like a scheduler's admin server") from error


def _followed(client: "httpx.Client", response: "httpx.Response") -> "httpx.Response":
    """The leader's answer, where a scheduler that stands by says who leads."""
    import httpx

    from core.errors import Unavailable

    if (there := response.next_request) is None:
        return response
    try:
        answer = client.send(there)
    except httpx.HTTPError as error:
        raise Unavailable(
            f"{response.url.host}:{response.url.port} stands by, and the admin server of the "
            f"scheduler that leads, {there.url.host}:{there.url.port}, cannot be reached from here"
        ) from error
    if answer.next_request is not None:
        raise Unavailable(
            f"the scheduler that leads is said to be at {there.url.host}:{there.url.port}, and who "
            "answers there stands by: ask again, and where that does not help, have each "
            "scheduler's scheduler.admin_host be an address that others reach"
        )
    return answer


def report(found: Mapping[str, Any]) -> str:
    """The answer for a person."""
    by = {"off": "fixed", "auto": "the demand decides"}.get(str(found["elastic"]), "")
    if found["override"] is not None:
        by = f"chosen: {_split(found['override'])}; `tandem scale --auto` lets the demand decide"
    lines = [f"now     {_split(found['now'])} ({by})"]
    if found["target"] is not None and found["target"] != found["now"]:
        lines.append(f"target  {_split(found['target'])}")
    lines.append(f"wanted  {_split(found['wanted'])} for the demand alone")
    if (load := found["load"]) is not None:
        lines.append(
            f"load    reading keeps {load['prefill']:.2f} workers busy, "
            f"decoding {load['decode']:.2f}"
        )
    width = max((len(each["worker"]) for each in found["workers"]), default=0)
    for each in found["workers"]:
        notes = [name for name in ("turning", "draining") if each[name]]
        line = f"{each['worker']:<{width}}  {each['role']:<7}  {each['num_placed']:>4} placed"
        lines.append("  ".join([line, *notes]))
    return "\n".join(lines)


def _split(split: Mapping[str, int]) -> str:
    return f"{split['prefill']} prefill + {split['decode']} decode"
