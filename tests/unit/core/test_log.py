"""What is logged can change while a process runs."""

import asyncio
import json
import os
import signal

import pytest
import structlog

from core.config import ClusterConfig
from core.log import configure


@pytest.fixture(autouse=True)
def _as_before():
    yield
    structlog.reset_defaults()


def told(capsys):
    return [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()]


async def test_a_signal_has_everything_logged_and_another_takes_it_back(capsys):
    logger = configure(ClusterConfig(log_level="warning", log_format="json"), "p")
    turned = asyncio.Event()

    async def signalled(number):
        os.kill(os.getpid(), number)
        asyncio.get_running_loop().call_later(0.01, turned.set)
        await turned.wait()
        turned.clear()

    logger.info("before")
    logger.warning("warned")
    await signalled(signal.SIGUSR1)
    logger.debug("then")
    await signalled(signal.SIGUSR2)
    logger.info("after")
    logger.error("failed")
    assert told(capsys) == ["warned", "then", "failed"]


def test_without_an_event_loop_the_level_is_the_configured_one(capsys):
    logger = configure(ClusterConfig(log_level="info", log_format="json"), "p")
    logger.debug("no")
    logger.info("yes")
    assert told(capsys) == ["yes"]
