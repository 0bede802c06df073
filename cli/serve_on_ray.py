"""`tandem serve --on ray`: a cluster on the nodes of Ray, until Ctrl-C."""

import asyncio
import os
import sys

from rich.console import Console

from cli.serve import who_may_call, workers_line
from cli.serving import serve_until_told
from core.config import ClusterConfig
from core.errors import ConfigError


def run(config: ClusterConfig, address: str | None) -> None:
    """Serves until SIGINT or SIGTERM. Raises TandemError where the cluster cannot be kept up."""
    # Its own handlers would take SIGTERM from us, print a trace and abort. Read at its import.
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    try:
        from deploy.ray_cluster import RayCluster
    except ModuleNotFoundError as error:
        raise ConfigError(f"--on ray needs the extra ray: no module {error.name}") from error

    def announce(cluster: RayCluster) -> None:
        out = Console(highlight=False, soft_wrap=True)
        out.print("served at", style="green")
        for url, target in zip(cluster.http_urls, cluster.grpc_targets, strict=True):
            out.print(f"  HTTP   {url}/v1")
            out.print(f"  gRPC   {target}")
        out.print(f"  admin  {cluster.admin_url}")
        out.print(f"by {workers_line(*config.num_workers)} on Ray")
        out.print(f"for {who_may_call(config.gateway)}")
        out.print("Ctrl-C stops it.", style="dim")
        sys.stdout.flush()

    asyncio.run(serve_until_told(RayCluster(config, address=address), announce=announce))
