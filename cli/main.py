"""The `tandem` command: what it can be told. Each command's work is in a file of its own.

Imports stay inside the commands, so that `tandem --help` answers at once.
"""

import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer

from cli import bench, calibrate, key, run, scale, simulate, top, trace

_DISTRIBUTION = "tandem-llm"
_EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells say it

app = typer.Typer(
    name="tandem",
    help="Serve a language model from two pools of processes, and talk to it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"tandem {metadata.version(_DISTRIBUTION)}")
        raise typer.Exit


@app.callback(
    epilog="[bold]Examples[/bold]\n\n"
    "  tandem serve\n\n"
    "  tandem chat 'What is the capital of France?'"
)
def tandem(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say it, end.")
    ] = False,
) -> None:
    """Serve a language model from two pools of processes, and talk to it."""


@app.command(
    epilog="[bold]Examples[/bold]\n\n"
    "  tandem serve\n\n"
    "  tandem serve --prefill 2 --decode 2 --dtype float32\n\n"
    "  tandem serve --model ./Qwen2-0.5B-Instruct --served-name qwen --http-port 9000\n\n"
    "  tandem serve --config cluster.toml --log-level debug\n\n"
    "  tandem serve --on ray --address auto --prefill 2 --decode 2\n\n"
    "Every setting of the file is in docs/configuration.md. A variable such as "
    "TANDEM__GATEWAY__HTTP_PORT wins over the file, a flag over both."
)
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A GGUF file, a Hugging Face folder, a hub id, or the default's name; repeated: "
            "several models."
        ),
    ] = None,
    served_name: Annotated[
        list[str] | None,
        typer.Option(help="The model's name in the API; one for each, where models are several."),
    ] = None,
    gateways: Annotated[
        int | None, typer.Option(help="How many gateways, each on ports of its own.")
    ] = None,
    prefill: Annotated[
        int | None, typer.Option(help="How many prefill workers. 0: decode workers do it all.")
    ] = None,
    decode: Annotated[int | None, typer.Option(help="How many decode workers.")] = None,
    on: Annotated[
        Literal["local", "ray"], typer.Option(help="Where: this machine, or the nodes of Ray.")
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(help="With --on ray: auto, HOST:PORT, ray://…. Default: a Ray here."),
    ] = None,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Workers turn between the two as the demand has it.")
    ] = False,
    schedulers: Annotated[
        int | None, typer.Option(help="One leads, the others stand by; more than 1 need Redis.")
    ] = None,
    transport: Annotated[
        Literal["auto", "shm", "tcp", "collective", "nixl", "cuda_ipc"] | None,
        typer.Option(help="How KV blocks travel."),
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None, typer.Option(help="The weights' type.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="The address that HTTP and gRPC listen on.")
    ] = None,
    http_port: Annotated[int | None, typer.Option(help="0: any free port.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="0: any free port.")] = None,
    admin_port: Annotated[int | None, typer.Option(help="0: any free port.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines without asking for keys.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(help="Compute threads of each worker. Default: cores / workers.")
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None, typer.Option(help="What is logged.")
    ] = None,
    log_format: Annotated[
        Literal["auto", "json", "pretty"] | None, typer.Option(help="auto: pretty on a terminal.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file; docs/configuration.md has its settings.")
    ] = None,
) -> None:
    """Start a cluster and serve until Ctrl-C (twice: at once)."""
    from cli.serve import run as serve_here
    from cli.serve_on_ray import run as serve_on_ray
    from cli.settings import cluster_config, model_flags
    from core.errors import ConfigError

    flags: dict[str, object] = {
        **model_flags(model or (), served_name or ()),
        "gateways": gateways,
        "prefill_workers": prefill,
        "decode_workers": decode,
        "scheduler.elastic": "auto" if elastic else None,
        "schedulers": schedulers,
        "transfer.transport": transport,
        "engine.dtype": dtype,
        "engine.threads": threads,
        "gateway.host": host,
        "gateway.http_port": http_port,
        "gateway.grpc_port": grpc_port,
        "gateway.insecure": insecure or None,
        "scheduler.admin_port": admin_port,
        "log_level": log_level,
        "log_format": log_format,
    }
    settings = cluster_config(config, flags)
    if on == "ray":
        serve_on_ray(settings, address)
    elif address is not None:
        raise ConfigError("--address: it is that of Ray; give --on ray as well")
    else:
        serve_here(settings)


@app.command(
    epilog="[bold]Examples[/bold]\n\n"
    "  tandem chat 'What is the capital of France?'\n\n"
    "  tandem chat --temperature 0 --max-tokens 40 'Name three rivers.'\n\n"
    "  tandem chat --system 'Answer in one word.'\n\n"
    "Without a message it is a conversation: /reset forgets it, /quit or Ctrl-D ends it, Ctrl-C "
    "stops an answer."
)
def chat(
    message: Annotated[
        str | None, typer.Argument(help="What to say. Without it: a conversation.")
    ] = None,
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(envvar="TANDEM_API_KEY", help="Where the server asks for one."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Default: the first that the server names.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling, in (0, 1].")] = None,
    top_k: Annotated[int | None, typer.Option(help="Only the k likeliest; 0 is off.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Relative to the likeliest.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="The longest answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Ends the answer before this text; may be repeated.")
    ] = None,
) -> None:
    """Talk to a running server; the answer streams to the terminal."""
    from cli.chat import Conversation, converse, say_once
    from cli.client import Client

    options: dict[str, object] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "max_tokens": max_tokens,
        "seed": seed,
        "stop": stop or None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    with Client(url, api_key=api_key) as client:
        talk = Conversation(client, model or client.first_model(), given, system=system)
        if message is not None:
            say_once(talk, message)
        else:
            converse(talk)


run.register(app)
bench.register(app)
simulate.register(app)
calibrate.register(app)
scale.register(app)
top.register(app)
trace.register(app)
app.add_typer(key.app, name="key")


def main() -> None:
    """The entry point: an error that has a name is one line on stderr, without a traceback."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)
    except Exception as error:
        from cli.failure import exit_code

        code = exit_code(error)
        if code is None:
            raise
        sys.exit(code)


if __name__ == "__main__":
    main()
