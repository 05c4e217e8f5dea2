"""Until when a request is worked on: its own timeout, its client's stay, and nobody else's cancellation."""

import asyncio

import pytest
from offramp.server.errors import ClientGone, DeadlinePassed
from offramp.server.patience import Attended, Patience
from starlette.requests import Request


def request_of(client):
    """A request whose body was read; what its client does next is awaited from `client`."""

    async def receive():
        await client
        return {"type": "http.disconnect"}

    return Request({"type": "http", "headers": []}, receive)


async def forever():
    await asyncio.sleep(3600)


def run(scene):
    async def main():
        client = asyncio.get_running_loop().create_future()
        await scene(request_of(client), client)

    asyncio.run(main())


@pytest.mark.parametrize("seconds", [0, 0.005, 0.05])
def test_work_ends_with_its_timeout(seconds):
    async def scene(request, _):
        with Attended(request, Patience(60)) as attended:
            attended.work(patience := Patience(60))
            attended.allow(seconds)
            await forever()
        assert patience.over

    with pytest.raises(DeadlinePassed, match=rf"no answer within {seconds:g} s"):
        run(scene)


@pytest.mark.parametrize("after", [0, 0.05], ids=["at once", "after the first look"])
def test_a_longer_timeout_takes_the_place_of_the_first(after):
    async def scene(request, _):
        with Attended(request, Patience(60)) as attended:
            attended.work(Patience(0.06))
            await asyncio.sleep(after)
            attended.allow(60)
            await asyncio.sleep(0.1)

    run(scene)


def test_reading_has_a_patience_of_its_own_and_the_client_is_not_listened_to():
    async def scene(request, client):
        client.set_result(None)  # whoever asked for more of the body would be told that it has left
        with Attended(request, Patience(0.05, "late by {:g}")):
            await forever()

    with pytest.raises(DeadlinePassed, match=r"late by 0\.05"):
        run(scene)


@pytest.mark.parametrize("reading", [0, 0.05], ids=["read at once", "read for a while"])
@pytest.mark.parametrize("leaves", [0, 0.1], ids=["at once", "later"])
def test_a_client_that_hangs_up_is_heard(reading, leaves):
    async def scene(request, client):
        with Attended(request, Patience(60)) as attended:
            await asyncio.sleep(reading)
            attended.work(Patience(60))
            asyncio.get_running_loop().call_later(leaves, client.set_result, None)
            await asyncio.wait_for(forever(), 10)

    with pytest.raises(ClientGone, match="hung up"):
        run(scene)


def test_a_client_whose_body_took_its_time_is_heard_when_it_hangs_up():
    async def scene(request, client):
        with Attended(request, Patience(60)) as attended:
            await asyncio.sleep(0.05)  # the body is still coming at the first look
            attended.work(Patience(60))
            attended.allow(60)
            client.set_result(None)
            await asyncio.sleep(30)

    with pytest.raises(ClientGone):
        run(scene)


def test_what_ends_in_time_leaves_no_timer_and_no_task():
    async def scene(request, _):
        with Attended(request, Patience(60)) as attended:
            attended.work(Patience(0.1))
            await asyncio.sleep(0.03)  # it listens now
        await asyncio.sleep(0.1)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not asyncio.current_task().cancelling()

    run(scene)


def test_a_cancellation_from_outside_stays_one():
    async def scene(request, _):
        async def work():
            with Attended(request, Patience(60)) as attended:
                attended.work(Patience(60))
                await forever()

        task = asyncio.ensure_future(work())
        await asyncio.sleep(0.03)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(scene)


def test_an_error_of_the_work_itself_is_told_as_it_is():
    async def scene(request, _):
        with Attended(request, Patience(60)) as attended:
            attended.work(Patience(60))
            raise LookupError("its own")

    with pytest.raises(LookupError, match="its own"):
        run(scene)
