"""Arguments too long for a message, from a client to the command that reads them."""

from __future__ import annotations

import base64
import hashlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_client.errors import PodpipeError, RequestRefused, SessionLost
from host_client.host import Host
from host_client.parts import stage
from host_client.pipe import METHOD_NOT_FOUND
from in_pod_server.contract import MAX_STAGED_BYTES, METHOD_PART, PART_CHARS
from tests.host_client.conftest import Podpipe, StubCluster
from tests.host_client.test_session import BOUND, pipes, run

LARGE = 30 * 1024 * 1024


@pytest.fixture
async def host(stub: StubCluster) -> AsyncIterator[Host]:
    async with Host(stub.settings()) as opened:
        await opened.launcher.create(name="work")
        yield opened


@pytest.mark.parametrize("unit", ["x" * 1023 + "\n", '"\\\n\t', "é€\U0001f600\n"])
async def test_thirty_mebibytes_of_stdin_arrive_as_they_are(host: Host, unit: str) -> None:
    """L21: a connection was reset on 28 MiB."""
    text = unit * (LARGE // len(unit.encode()))
    with anyio.fail_after(BOUND):
        facts = await run(host, "work", "sha256sum; exit 7", stdin=text)
    assert facts["stdout"].split()[0] == hashlib.sha256(text.encode()).hexdigest()
    assert facts["exit_code"] == 7


async def test_long_scripts_and_heredocs_arrive_as_they_are(host: Host) -> None:
    """L21's neighbour: what is long is the command itself."""
    body = "é'\"$x`\\ " * 120_000
    with anyio.fail_after(BOUND):
        for script in (f"# {'x' * 140_000}\necho fine", f"cat <<'EOF' | sha256sum\n{body}\nEOF"):
            facts = await run(host, "work", script)
            digest = hashlib.sha256(f"{body}\n".encode()).hexdigest()
            assert facts["stdout"] in ("fine\n", f"{digest}  -\n")
        answer = await host.sessions.call(
            "work", "start_background", {"command": f"# {'x' * 2_000_000}\necho fine > made"}
        )
        read = {"process_id": answer["structuredContent"]["process_id"], "until_end": True}
        await host.sessions.call("work", "read_output", read | {"wait_seconds": 20})
        assert (await run(host, "work", "cat made"))["stdout"] == "fine\n"


async def test_others_are_answered_while_a_long_argument_is_on_its_way(host: Host) -> None:
    with anyio.fail_after(BOUND):
        answered = 0
        async with anyio.create_task_group() as tasks:

            async def long() -> None:
                facts = await run(host, "work", "wc -c", stdin="x" * LARGE)
                assert facts["stdout"] == f"{LARGE}\n"
                tasks.cancel_scope.cancel()

            tasks.start_soon(long)
            while True:
                with anyio.fail_after(10):
                    await run(host, "work", "true")
                answered += 1
    assert answered > 1


async def test_a_pipe_that_breaks_among_the_parts_costs_only_time(host: Host) -> None:
    """The call runs once, with all of its input."""
    with anyio.fail_after(BOUND):
        session = await host.sessions.open("work")
        ask = session._ask
        sent = 0

        async def breaking(
            method: str, params: dict[str, Any] | None, timeout: float, **options: Any
        ) -> Any:
            nonlocal sent
            sent += method == METHOD_PART
            if sent == 20:
                for pid in pipes():
                    os.kill(pid, signal.SIGKILL)
            return await ask(method, params, timeout, **options)

        session._ask = breaking  # type: ignore[method-assign]
        facts = await run(host, "work", "echo ran >> runs; wc -c", stdin="x" * LARGE)
        assert facts["stdout"] == f"{LARGE}\n"
        assert (await run(host, "work", "cat runs"))["stdout"] == "ran\n"
    assert sent >= 20


async def test_a_call_given_up_among_its_parts_leaves_nothing_there(host: Host) -> None:
    """There is room for one call of the most that fits, again and again."""
    most = "x" * (MAX_STAGED_BYTES - 1000)
    with anyio.fail_after(BOUND):
        session = await host.sessions.open("work")
        ask = session._ask
        for _ in range(3):
            with anyio.CancelScope() as scope:
                sent = 0

                async def until(
                    method: str,
                    params: Any,
                    timeout: float,
                    scope: anyio.CancelScope = scope,
                    **options: Any,
                ) -> Any:
                    nonlocal sent
                    sent += 1
                    if sent == 100:
                        scope.cancel()
                    return await ask(method, params, timeout, **options)

                session._ask = until  # type: ignore[method-assign]
                await run(host, "work", "echo begun >> begun; cat", stdin=most)
            assert scope.cancelled_caught
        session._ask = ask  # type: ignore[method-assign]
        facts = await run(host, "work", "wc -c; ls begun", stdin=most)
    assert (facts["stdout"], facts["exit_code"]) == (f"{len(most)}\n", 2)


async def test_more_than_a_sandbox_holds_is_refused_and_nothing_begins(host: Host) -> None:
    with anyio.fail_after(BOUND):
        with pytest.raises(PodpipeError, match=r"at most \d+ bytes .*upload_file"):
            await run(host, "work", "touch begun", stdin="x" * (MAX_STAGED_BYTES + 1))
        assert (await run(host, "work", "ls begun"))["exit_code"] == 2
        assert (await run(host, "work", "wc -c", stdin="x" * LARGE))["exit_code"] == 0


def test_the_command_line_gives_a_large_or_binary_stdin(stub: StubCluster) -> None:
    podpipe = Podpipe(stub)
    podpipe("create", "--name", "work")
    for data in (os.urandom(LARGE), b"\xff\x00", b"a\nb" * 100_000):
        process = podpipe.start("run", "-i", "work", "--", "sha256sum")
        out, err = process.communicate(data, timeout=90)
        assert out.split()[:1] == [hashlib.sha256(data).hexdigest().encode()], err
    process = podpipe.start("run", "-i", "work", "--", "touch begun")
    _, err = process.communicate(bytes(MAX_STAGED_BYTES), timeout=90)
    assert (process.returncode, b"`podpipe put` it" in err) == (2, True)


async def test_binary_stdin_is_given_as_base64(host: Host) -> None:
    data = os.urandom(3_000_000)
    with anyio.fail_after(BOUND):
        facts = await run(
            host,
            "work",
            "sha256sum",
            stdin=base64.b64encode(data).decode(),
            stdin_encoding="base64",
        )
        assert facts["stdout"].split()[0] == hashlib.sha256(data).hexdigest()
        wrong = {"command": "true", "stdin": "no base64", "stdin_encoding": "base64"}
        answer = await host.sessions.call("work", "run_command", wrong)
    assert "stdin is not base64" in answer["content"][0]["text"]


# --- the parts alone ---------------------------------------------------------------------------


def _no_notice(method: str, params: dict[str, Any]) -> None:
    raise AssertionError(f"{method} was not needed")


@given(st.text(min_size=1), st.integers(0, 3 * PART_CHARS))
@settings(deadline=None)
def test_parts_are_the_text_whatever_its_length(unit: str, length: int) -> None:
    text = (unit * (length // len(unit) + 1))[:length]
    parts: dict[int, str] = {}

    async def keep(method: str, params: dict[str, Any], timeout: float) -> None:
        parts[params["number"]] = params["text"]

    async def staged() -> None:
        done = await stage({"a": text, "n": 1}, ask=keep, notify=_no_notice, seconds=5)
        if length <= PART_CHARS:
            assert (done.arguments, done.named, parts) == ({"a": text, "n": 1}, {}, {})
        else:
            assert done.arguments == {"n": 1}
            assert done.named["a"]["count"] == len(parts)
            assert "".join(parts[number] for number in sorted(parts)) == text

    anyio.run(staged)


async def test_a_way_that_is_too_slow_is_said_and_the_parts_are_let_go() -> None:
    noticed: list[str] = []

    async def never(*_: object) -> None:
        await anyio.sleep_forever()

    def notice(method: str, params: dict[str, Any]) -> None:
        noticed.append(method)

    with pytest.raises(PodpipeError, match=r"0 % of stdin got through .* nothing was begun"):
        await stage({"stdin": "x" * 1_000_000}, ask=never, notify=notice, seconds=0.05)
    assert noticed == ["podpipe/parts-dropped"]


async def test_a_pipe_that_breaks_before_the_call_has_sent_nothing() -> None:
    async def broken(*_: object) -> None:
        raise SessionLost("the pipe broke", sent=True)

    def notice(*_: object) -> None:
        return None

    with pytest.raises(SessionLost) as caught:
        await stage({"stdin": "x" * 1_000_000}, ask=broken, notify=notice, seconds=5)
    assert caught.value.sent is False


async def test_an_old_image_is_named_as_such() -> None:
    """Its daemon does not know the method."""

    async def unknown(*_: object) -> None:
        raise RequestRefused("Method not found", code=METHOD_NOT_FOUND)

    def notice(*_: object) -> None:
        return None

    with pytest.raises(PodpipeError, match="older than this podpipe"):
        await stage({"stdin": "x" * 1_000_000}, ask=unknown, notify=notice, seconds=5)
