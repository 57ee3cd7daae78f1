"""The ways to apps: each leads to one port, ends by itself, and is made wherever there is room."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import struct
from collections.abc import AsyncIterator, Iterator

import anyio
import pytest

from in_pod_server.gateway import ways as module
from in_pod_server.gateway.ways import Ways
from tests.in_pod_server.gateways import free_port

BOUND = 20


@pytest.fixture
async def ways() -> AsyncIterator[Ways]:
    found = Ways()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(found.run)
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(BOUND):
            yield found
        tasks.cancel_scope.cancel()


@pytest.fixture(params=["127.0.0.1", "::1"])
async def app(request: pytest.FixtureRequest) -> AsyncIterator[int]:
    """The port of an app that says all that it hears, on either loopback."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    async with await asyncio.start_server(echo, request.param, 0) as server:
        yield server.sockets[0].getsockname()[1]


async def connected(upstream: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address, _, port = upstream.partition(":")
    return await asyncio.open_connection(address, int(port))


async def echoes(upstream: str) -> bool:
    reader, writer = await connected(upstream)
    writer.write(b"hello")
    heard = await reader.readexactly(5)
    writer.close()
    return heard == b"hello"


async def test_each_app_port_and_grant_has_a_way_of_its_own_that_stays(
    ways: Ways, app: int
) -> None:
    first = ways.to("web", app, None)
    assert ways.to("web", app, None) == first
    assert len({first, ways.to("other", app, None), ways.to("web", app + 1, None)}) == 3
    assert await echoes(first)


async def test_what_is_open_is_counted_and_cut_with_its_way_alone(ways: Ways, app: int) -> None:
    ended, kept = ways.to("web", app, None), ways.to("other", app, None)
    (reader, writer), (other, its) = await connected(ended), await connected(kept)
    for each, heard in ((writer, reader), (its, other)):
        each.write(b"x")
        assert await heard.readexactly(1) == b"x"
    assert ways.open_requests() == 2
    ways.end_unless(lambda name, _port, _grant: name == "other")
    with pytest.raises(ConnectionResetError):
        await reader.read(1)
    with pytest.raises(ConnectionRefusedError):
        await connected(ended)
    its.write(b"y")
    assert await other.readexactly(1) == b"y"
    assert ways.open_requests() == 1
    assert ways.to("web", app, None) != ended, "no address is used twice"
    writer.close()
    its.close()


async def test_a_port_on_which_nothing_listens_cuts_at_once(ways: Ways) -> None:
    reader, writer = await connected(ways.to("web", free_port(), None))
    with pytest.raises(ConnectionResetError):
        await reader.read(1)
    writer.close()


@pytest.mark.parametrize("cut", [True, False])
async def test_what_an_app_cuts_off_does_not_look_like_what_has_ended(
    ways: Ways, cut: bool
) -> None:
    async def say_half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.write(b"half")
        await reader.readexactly(1)
        if cut:
            linger = struct.pack("ii", 1, 0)
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    async with await asyncio.start_server(say_half, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await connected(ways.to("web", port, None))
        writer.write(b"x")
        assert await reader.readexactly(4) == b"half"
        writer.write(b"x")
        if cut:
            with pytest.raises(ConnectionResetError):
                await reader.read()
        else:
            assert await reader.read() == b""
        writer.close()


async def test_so_many_requests_are_open_at_once_and_no_more(
    ways: Ways, app: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_OPEN", 2)
    upstream = ways.to("web", app, None)
    taken = [await connected(upstream) for _ in range(2)]
    for reader, writer in taken:
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
    reader, refused = await connected(upstream)
    with pytest.raises(ConnectionResetError):
        await reader.read(1)
    refused.close()
    for _, writer in taken:
        writer.close()
    while ways.open_requests():  # noqa: ASYNC110 - the fixture bounds it
        await anyio.sleep(0.01)
    assert await echoes(upstream)


async def test_many_grants_and_apps_take_few_addresses_and_cut_nothing_that_is_open(
    ways: Ways, app: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAYS", 3)
    used, idle, asked_again = (ways.to(name, app, None) for name in ("used", "idle", "again"))
    reader, writer = await connected(used)
    writer.write(b"x")
    assert await reader.readexactly(1) == b"x"
    ways.to("again", app, None)
    assert await echoes(ways.to("more", app, None))
    with pytest.raises(ConnectionRefusedError):
        await connected(idle)
    assert await echoes(asked_again)
    writer.write(b"y")
    assert await reader.readexactly(1) == b"y"
    assert await echoes(ways.to("idle", app, None)), "it is made again"
    writer.close()


async def test_a_way_waits_where_no_descriptor_is_left_for_a_request(
    ways: Ways, app: int, caplog: pytest.LogCaptureFixture
) -> None:
    upstream = ways.to("web", app, None)
    address, _, port = upstream.partition(":")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as client:
        client.setblocking(False)
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, hard))
        fillers = list(_filled())
        try:
            client.connect_ex((address, int(port)))
            while not caplog.records:  # noqa: ASYNC110 - the fixture bounds it
                await anyio.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in fillers:
                os.close(fd)
    assert ["no connection can be accepted" in each.message for each in caplog.records] == [True]
    assert await echoes(upstream)


def _filled() -> Iterator[int]:
    """Descriptors until there is none left."""
    with contextlib.suppress(OSError):
        while True:
            yield os.open(os.devnull, os.O_RDONLY)


async def test_there_is_a_way_where_a_command_has_the_port_at_every_address(
    ways: Ways, app: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setattr(module, "PORT", taken.getsockname()[1])
        upstream = ways.to("web", app, None)
        assert not upstream.endswith(f":{module.PORT}")
        assert await echoes(upstream)
