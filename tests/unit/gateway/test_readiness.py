"""Who is asked whether requests can be served hears of every change."""

import asyncio

from gateway.readiness import Readiness


def test_nothing_is_ready_before_it_is_said_to_be():
    readiness = Readiness()
    assert readiness() == (False, "the gateway is starting")
    readiness.say(None)
    assert readiness() == (True, "")
    readiness.say("no workers")
    assert readiness() == (False, "no workers")


async def test_a_follower_hears_the_present_state_and_each_change():
    readiness = Readiness()
    heard = []

    async def follow():
        async for ready in readiness.changes():
            heard.append(ready)

    following = asyncio.create_task(follow())
    for not_ready in ("no workers", None, None, "stopping"):
        await asyncio.sleep(0)
        readiness.say(not_ready)
    await asyncio.sleep(0)
    assert heard[:1] == [False]
    assert heard[-2:] == [True, False]
    following.cancel()


async def test_a_change_that_comes_while_a_follower_is_busy_is_not_missed():
    readiness = Readiness()
    changes = readiness.changes()
    assert await anext(changes) is False
    readiness.say(None)
    assert await asyncio.wait_for(anext(changes), 5) is True
    await changes.aclose()
