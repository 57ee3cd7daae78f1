"""Requests and answers over a child's stdin and stdout, whatever the child does."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from host_client.errors import RequestRefused, SessionLost
from host_client.pipe import MOST_SILENCES, NEWS_KEPT, Pipe
from in_pod_server.contract import MAX_REQUEST_BYTES

BOUND = 30

CHILD = """
import json, os, signal, sys, time
out = sys.stdout.buffer
def say(**m):
    out.write(json.dumps({"jsonrpc": "2.0", **m}).encode() + b"\\n"); out.flush()
def news(done, message=None):
    token = m["params"]["_meta"]["progressToken"]
    say(method="notifications/progress",
        params={"progressToken": token, "progress": done, "total": 9, "message": message})
for line in sys.stdin.buffer:
    m = json.loads(line)
    n, what, params = m.get("id"), m.get("method"), m.get("params")
"""
"""A server of one's own: what follows is what it does with each message."""

ECHO = CHILD + "    if n: say(id=n, result={'asked': params})\n"


@asynccontextmanager
async def speaking(program: str) -> AsyncIterator[Pipe]:
    pipe = await Pipe.start([sys.executable, "-Suc", program], os.environ, "the child")
    try:
        with anyio.fail_after(BOUND):
            yield pipe
    finally:
        await pipe.aclose()


async def test_each_request_gets_its_own_answer_in_any_order() -> None:
    held = CHILD + (
        "    held = globals().setdefault('held', [])\n"
        "    held.append((n, params))\n"
        "    if len(held) == 50:\n"
        "        for n, params in reversed(held): say(id=n, result=params)\n"
    )
    answers: dict[int, int] = {}
    async with speaking(held) as pipe, anyio.create_task_group() as tasks:

        async def ask(number: int) -> None:
            answers[number] = (await pipe.request("m", {"k": number}, timeout=BOUND))["k"]

        for number in range(50):
            tasks.start_soon(ask, number)
    assert answers == {number: number for number in range(50)}


async def test_text_of_every_kind_and_length_comes_back() -> None:
    text = "é€\U0001f600\x00\u2028" * 200_000
    async with speaking(ECHO) as pipe:
        assert await pipe.request("m", {"t": text}, timeout=BOUND) == {"asked": {"t": text}}


async def test_an_error_of_the_protocol_is_no_lost_call() -> None:
    program = CHILD + "    say(id=n, error={'code': -32602, 'message': 'bad'})\n"
    async with speaking(program) as pipe:
        with pytest.raises(RequestRefused, match="bad") as caught:
            await pipe.request("m", timeout=BOUND)
    assert caught.value.code == -32602


@pytest.mark.parametrize("answer", ["result=7", "error='no'", "error={'code': 'x'}", "other=1"])
async def test_an_answer_that_is_none_of_the_protocol_is_refused(answer: str) -> None:
    async with speaking(CHILD + f"    say(id=n, {answer})\n") as pipe:
        with pytest.raises(RequestRefused, match="not one of the protocol"):
            await pipe.request("m", timeout=BOUND)


UNASKED = [
    '{"id": []}',
    '{"id": {}, "result": {}}',
    '{"id": "1", "result": {"wrong": 1}}',
    '{"id": null, "error": {}}',
    '{"id": "\\\\ud800", "method": "ping"}',
    '{"id": [1], "method": "ping"}',
    '{"method": "notifications/progress", "params": {"progressToken": [], "progress": 1}}',
    '{"method": "notifications/progress", "params": 7}',
    '{"method": 7}',
]
"""Messages that no daemon of ours sends."""


@pytest.mark.parametrize(
    "noise",
    [
        "b'kubectl: warning\\n'",
        "b'\\xff\\xfe\\n'",
        "b'[1]\\n\\n{\\n'",
        "b'[' * 100000 + b'\\n'",
        *(f"b'{message}\\n'" for message in UNASKED),
    ],
)
async def test_noise_on_stdout_is_passed_over(noise: str) -> None:
    async with speaking(CHILD + f"    out.write({noise}); say(id=n, result={{}})\n") as pipe:
        assert await pipe.request("m", timeout=BOUND) == {}


async def test_an_answer_that_is_too_long_fails_its_request_alone() -> None:
    program = CHILD + (
        "    if what == 'long': say(id=n, result={'t': 'x' * params['size']})\n"
        "    else: say(id=n, result={})\n"
    )
    async with speaking(program) as pipe:
        with pytest.raises(RequestRefused, match=r"has \d+ bytes"):
            await pipe.request("long", {"size": MAX_REQUEST_BYTES}, timeout=BOUND)
        assert await pipe.request("short", timeout=BOUND) == {}


async def test_progress_reaches_its_own_request_in_order() -> None:
    heard: list[Any] = []

    async def hear(done: float, total: float | None, message: str | None) -> None:
        heard.append((done, total, message))

    program = CHILD + "    news(1); news(2.5, 'half'); say(id=n, result={})\n"
    async with speaking(program) as pipe:
        await pipe.request("m", {"_meta": {"k": 1}}, timeout=BOUND, on_progress=hear)
    assert heard == [(1, 9, None), (2.5, 9, "half")]


async def test_progress_of_other_types_than_the_protocol_s_is_left_out() -> None:
    odd = CHILD + (
        "    for done, total, said in ((1, 'x', {}), ('2', 3, ''), (None, None, None), (4, 5, 'six')):\n"
        "        say(method='notifications/progress', params={'progressToken': n, 'progress': done,\n"
        "            'total': total, 'message': said})\n"
        "    say(id=n, result={})\n"
    )
    heard: list[tuple[Any, ...]] = []

    async def hear(*what: Any) -> None:
        heard.append(what)

    async with speaking(odd) as pipe:
        await pipe.request("ask", timeout=BOUND, on_progress=hear)
    assert heard == [(1, None, None), (4, 5, "six")]


async def test_a_slow_listener_costs_old_progress_and_not_memory() -> None:
    heard: list[float] = []

    async def hear(done: float, total: float | None, message: str | None) -> None:
        if not heard:
            await answered.wait()
        heard.append(done)

    answered = anyio.Event()
    program = CHILD + (
        "    if what == 'm':\n"
        "        for number in range(1000): news(number)\n"
        "    say(id=n, result={})\n"
    )
    async with speaking(program) as pipe, anyio.create_task_group() as tasks:

        async def ask() -> None:
            await pipe.request("m", {}, timeout=BOUND, on_progress=hear)

        tasks.start_soon(ask)
        await anyio.lowlevel.checkpoint()
        await pipe.request("other", timeout=BOUND)
        answered.set()
    assert heard[-1] == 999
    assert len(heard) <= NEWS_KEPT + 1000 // NEWS_KEPT


async def test_a_child_that_dies_loses_what_was_asked_and_says_what_it_wrote() -> None:
    program = CHILD + (
        "    sys.stderr.write('x' * 100000 + 'the reason'); sys.stderr.flush(); os._exit(0)\n"
    )
    async with speaking(program) as pipe:
        with pytest.raises(SessionLost, match="broke") as caught:
            await pipe.request("m", timeout=BOUND)
        assert caught.value.sent
        with pytest.raises(SessionLost, match="closed") as later:
            await pipe.request("m", timeout=BOUND)
        assert not later.value.sent
        while not pipe.stderr.endswith(b"the reason"):
            await anyio.lowlevel.checkpoint()
    assert len(pipe.stderr) < 100_000


async def test_a_frozen_child_is_given_up_in_time_and_the_pipe_goes_on() -> None:
    program = CHILD + "    if what != 'never': say(id=n, result={})\n"
    async with speaking(program) as pipe:
        with pytest.raises(SessionLost, match=r"the child did not answer within 0\.1 s") as caught:
            await pipe.request("never", timeout=0.1)
        assert caught.value.sent
        assert await pipe.request("m", timeout=BOUND) == {}


DRIPS = CHILD + (
    "    for _ in range(params['drips']): time.sleep(0.1); say(method='notifications/message')\n"
    "    say(id=n, result={})\n"
)


async def test_an_answer_that_waits_behind_others_is_waited_for_while_they_come() -> None:
    async with speaking(DRIPS) as pipe:
        call = {"drips": 12}
        assert await pipe.request("ask", call, timeout=0.5, of_silence=True) == {}
        with pytest.raises(SessionLost, match=r"did not answer within 0.5 s"):
            await pipe.request("ask", call, timeout=0.5)


async def test_what_brings_all_but_the_answer_is_given_up_in_the_end() -> None:
    """Its way out may live while its way in is dead."""
    async with speaking(DRIPS) as pipe:
        began = anyio.current_time()
        with pytest.raises(SessionLost, match="did not answer"):
            await pipe.request("ask", {"drips": 100}, timeout=0.5, of_silence=True)
        assert 0.5 * MOST_SILENCES <= anyio.current_time() - began < 8


async def test_what_found_no_room_was_not_sent() -> None:
    """A child that does not read: what is behind a full pipe has not been sent, and that is said."""
    async with speaking("import time; time.sleep(600)") as pipe:
        lost: list[bool] = []

        async def ask(size: int) -> None:
            with pytest.raises(SessionLost) as caught:
                await pipe.request("m", {"t": "x" * size}, timeout=0.5)
            lost.append(caught.value.sent)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, 8_000_000)
            await anyio.lowlevel.checkpoint()
            tasks.start_soon(ask, 1)
    assert lost == [True, False]


async def test_only_a_wanted_cancellation_is_passed_on() -> None:
    program = CHILD + (
        "    seen = globals().setdefault('seen', [])\n"
        "    if what == 'notifications/cancelled': seen.append(params['requestId'])\n"
        "    if what == 'seen': say(id=n, result={'seen': seen})\n"
        "    if what == 'wait': news(0)\n"
    )
    async with speaking(program) as pipe:
        for wanted in (False, True):
            async with anyio.create_task_group() as tasks:

                async def begun(*_: object, scope: anyio.CancelScope = tasks.cancel_scope) -> None:
                    scope.cancel()

                async def ask(wanted: bool = wanted, begun: Any = begun) -> None:
                    await pipe.request(
                        "wait", {}, timeout=BOUND, on_progress=begun, cancels=lambda: wanted
                    )

                tasks.start_soon(ask)
        assert await pipe.request("seen", timeout=BOUND) == {"seen": [2]}


async def test_the_other_end_may_ask_whether_we_live() -> None:
    program = CHILD + (
        "    if what == 'm': asker = n; say(id='a', method='ping'); say(id='b', method='roots/list')\n"
        "    elif n == 'b': say(id=asker, result={'answers': [got, m['error']['code']]})\n"
        "    else: got = m['result']\n"
    )
    async with speaking(program) as pipe:
        assert await pipe.request("m", timeout=BOUND) == {"answers": [{}, -32601]}


async def test_a_child_that_ends_by_itself_is_given_the_time(tmp_path: Path) -> None:
    program = ECHO + f"open({str(tmp_path / 'ended')!r}, 'w').close()\n"
    async with speaking(program) as pipe:
        await pipe.request("m", timeout=BOUND)
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize("stopped", [False, True], ids=["deaf", "frozen"])
async def test_a_child_that_will_not_end_is_made_to(stopped: bool) -> None:
    program = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('up', flush=True, file=__import__('sys').stderr)\n"
        "time.sleep(600)\n"
    )
    async with speaking(program) as pipe:
        while not pipe.stderr:
            await anyio.lowlevel.checkpoint()
        pid = pipe.pid
        if stopped:
            os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
