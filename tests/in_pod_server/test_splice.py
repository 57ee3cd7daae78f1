"""Two connections joined: every byte, each end, each loss, and no more held than has to be."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from in_pod_server.splice import End

BOUND = 20


class Pair:
    """A client and a server, and what is spliced between them."""

    def __init__(self, client: socket.socket, server: socket.socket, ends: list[End]) -> None:
        self.client = client
        self.server = server
        self.near, self.far = ends


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    loop = asyncio.get_running_loop()
    outer, ends = [], []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
        ours.setblocking(False)
        outer.append(ours)
        _, end = await loop.create_connection(End, sock=theirs)
        ends.append(end)
    try:
        with anyio.fail_after(BOUND):
            yield Pair(outer[0], outer[1], ends)
    finally:
        for each in outer:
            each.close()
        for end in ends:
            end.transport.abort()
            await end.lost.wait()


async def read(sock: socket.socket) -> bytes:
    """All that is said to the end."""
    loop, said = asyncio.get_running_loop(), b""
    while chunk := await loop.sock_recv(sock, 1 << 20):
        said += chunk
    return said


async def test_what_both_say_arrives_whole_and_so_do_their_ends() -> None:
    loop = asyncio.get_running_loop()
    up, down = os.urandom(3_000_000), os.urandom(2_000_000)

    async def say(sock: socket.socket, data: bytes) -> None:
        await loop.sock_sendall(sock, data)
        sock.shutdown(socket.SHUT_WR)

    heard = {}

    async def hear(name: str, sock: socket.socket) -> None:
        heard[name] = await read(sock)

    async with pair() as both, anyio.create_task_group() as tasks:
        tasks.start_soon(both.near.join, both.far, b"first ")
        tasks.start_soon(say, both.client, up)
        tasks.start_soon(say, both.server, down)
        tasks.start_soon(hear, "server", both.server)
        tasks.start_soon(hear, "client", both.client)
    assert heard == {"server": b"first " + up, "client": down}


async def test_what_came_before_they_were_joined_is_not_lost() -> None:
    loop = asyncio.get_running_loop()
    async with pair() as both:
        await loop.sock_sendall(both.client, b"head|")
        assert await both.near.receive() == b"head|"
        await loop.sock_sendall(both.client, b"early|")
        await loop.sock_sendall(both.server, b"greeting")
        both.client.shutdown(socket.SHUT_WR)
        both.server.shutdown(socket.SHUT_WR)
        await anyio.wait_all_tasks_blocked()
        await both.near.join(both.far, b"head|")
        assert await read(both.server) == b"head|early|"
        assert await read(both.client) == b"greeting"


async def test_who_says_too_much_before_that_is_not_read_further() -> None:
    loop = asyncio.get_running_loop()
    async with pair() as both:
        with anyio.move_on_after(0.5) as stalled:
            await loop.sock_sendall(both.client, bytes(64_000_000))
        assert stalled.cancelled_caught
        assert len(await both.near.receive()) < 1_000_000


async def test_a_slow_reader_holds_the_other_up_instead_of_filling_memory() -> None:
    loop = asyncio.get_running_loop()
    async with pair() as both, anyio.create_task_group() as tasks:
        tasks.start_soon(both.near.join, both.far)
        sent = 0
        with anyio.move_on_after(1):
            while True:
                await loop.sock_sendall(both.server, bytes(1 << 20))
                sent += 1 << 20
        assert sent < 32 << 20
        both.server.shutdown(socket.SHUT_WR)
        both.client.shutdown(socket.SHUT_WR)
        assert len(await read(both.client)) >= sent


@pytest.mark.parametrize("how", ["end", "reset"])
async def test_who_hears_nothing_is_told_so(how: str) -> None:
    async with pair() as both, anyio.create_task_group() as tasks:
        if how == "reset":
            both.server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        both.server.close()

        async def join() -> None:
            await both.near.join(both.far, b"request", silent=b"nobody is there")

        tasks.start_soon(join)
        assert await read(both.client) == b"nobody is there"


async def test_what_is_reset_does_not_look_like_what_has_ended() -> None:
    loop = asyncio.get_running_loop()
    async with pair() as both, anyio.create_task_group() as tasks:
        tasks.start_soon(both.near.join, both.far)
        await loop.sock_sendall(both.server, b"some")
        assert await loop.sock_recv(both.client, 4) == b"some"
        both.server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        both.server.close()
        with pytest.raises(ConnectionResetError):
            await loop.sock_recv(both.client, 1)


async def test_one_that_went_before_it_was_led_anywhere_ends_the_other() -> None:
    async with pair() as both:
        both.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        both.client.close()
        await both.near.lost.wait()
        await both.near.join(both.far, b"")
        assert await read(both.server) == b""
