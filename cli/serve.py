"""`tandem serve`: a cluster on this machine, until Ctrl-C."""

import asyncio
import json
import sys

from rich.console import Console

from cli.serving import serve_until_told
from core.config import ClusterConfig, GatewayConfig
from deploy.local import LocalCluster


def run(config: ClusterConfig) -> None:
    """Serves until SIGINT or SIGTERM. Raises TandemError where the cluster cannot be kept up."""
    asyncio.run(serve_until_told(LocalCluster(config), announce=announce))


def announce(cluster: LocalCluster) -> None:
    """Prints the endpoints and a line to try."""
    out = Console(highlight=False, soft_wrap=True)
    names = ", ".join(model.name for model in cluster.models)
    is_or_are = "are" if len(cluster.models) > 1 else "is"
    out.print(f"[bold]{names}[/bold] {is_or_are} served at", style="green")
    for url, target in zip(cluster.http_urls, cluster.grpc_targets, strict=True):
        out.print(f"  HTTP   {url}/v1")
        out.print(f"  gRPC   {target}")
    out.print(f"  admin  {cluster.admin_url}")
    out.print(f"by {workers_line(*cluster.num_workers)}")
    out.print(f"for {who_may_call(cluster.config.gateway)}")
    out.print("Try:")
    # Not through markup: the JSON has brackets.
    key = cluster.config.gateway.api_keys_file is not None
    example = curl_line(cluster.http_urls[0], cluster.models[0].name, key=key)
    out.print(f"  {example}", markup=False)
    out.print("Ctrl-C stops it.", style="dim")
    sys.stdout.flush()


def workers_line(num_prefill: int, num_decode: int) -> str:
    """The pools in words."""
    decode = f"{num_decode} decode worker{'s' if num_decode > 1 else ''}"
    if num_prefill:
        return f"{num_prefill} prefill worker{'s' if num_prefill > 1 else ''} and {decode}"
    return f"{decode}, reading prompts as well"


def who_may_call(gateway: GatewayConfig) -> str:
    """The callers in words."""
    asked = {
        "an API key": gateway.api_keys_file,
        "a client certificate": gateway.tls_client_ca_file,
    }
    shown = " and ".join(name for name, file in asked.items() if file is not None)
    if shown:
        return f"whoever shows {shown}"
    reach = "on this machine" if gateway.loopback else "who reaches it (--insecure)"
    return f"everybody {reach}: no API keys are configured"


def curl_line(url: str, model: str, *, key: bool = False) -> str:
    """A request that a shell takes as it is, once TANDEM_API_KEY holds a key where one is asked."""
    question = {"role": "user", "content": "What is the capital of France?"}
    request = {"model": model, "messages": [question], "temperature": 0}
    body = json.dumps(request).replace("'", "'\\''")
    headers = ["-H 'Content-Type: application/json'"]
    if key:
        headers.append('-H "Authorization: Bearer $TANDEM_API_KEY"')
    return f"curl {url}/v1/chat/completions {' '.join(headers)} -d '{body}'"
