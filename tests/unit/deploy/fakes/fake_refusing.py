"""A process that cannot work with its configuration."""

import asyncio

from core.errors import ConfigError
from core.process import ProcessContext, run
from core.telemetry.names import Role


async def main(context: ProcessContext, stop: asyncio.Event) -> None:
    raise ConfigError("the tokenizer is missing")


if __name__ == "__main__":
    run(main, Role.GATEWAY)
