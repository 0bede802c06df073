"""A launcher of fakes, to be killed: `fake_launcher MODEL` prints its run directory."""

import asyncio
import sys

from core.config import ClusterConfig, GatewayConfig, SchedulerConfig
from deploy.local import LocalCluster
from deploy.roles import Roles


async def serve() -> None:
    config = ClusterConfig(
        model=sys.argv[1],
        gateway=GatewayConfig(http_port=0, grpc_port=0),
        scheduler=SchedulerConfig(admin_port=0),
    )
    roles = Roles(
        prepare="fake_prepare",
        scheduler="fake_role",
        prefill="fake_role",
        decode="fake_role",
        gateway="fake_role",
    )
    async with LocalCluster(config, roles=roles) as cluster:
        print(cluster.run_dir.path, flush=True)
        await cluster.wait()


asyncio.run(serve())
