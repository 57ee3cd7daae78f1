"""The sandbox's own page: its apps, what runs, how long it lives, how full its home is.

It keeps itself up to date by asking for its inner part again; without scripts it is still a page.
"""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from in_pod_server.gateway import pages
from in_pod_server.gateway.auth import Answer, Request
from in_pod_server.output import Output
from in_pod_server.process import Process

LIVE: Final = "/live"
GO: Final = "/go/"
LAST_LINES: Final = 5
LAST_BYTES: Final = 2000
COMMAND_CHARS: Final = 200
MOST_COMMANDS: Final = 20

_SCRIPT: Final = (
    "const b=document.getElementById('live');let last='';"
    "async function look(){let t;try{const r=await fetch('/live',{cache:'no-store'});"
    "t=r.ok?await r.text():null}catch(e){t=null}"
    "document.getElementById('gone').hidden=t!==null;"
    "if(t!==null&&t!==last&&!String(getSelection())){b.innerHTML=last=t}"
    "setTimeout(look,document.hidden?10000:2000)}look()"
)
_SCRIPT_SOURCE: Final = (
    f"'sha256-{base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()}'"
)


@dataclass(frozen=True, slots=True)
class App:
    """One published app, as it is now."""

    name: str
    port: int
    answers: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """What the page shows."""

    apps: Sequence[App]
    processes: Iterable[Process]
    expires_at: datetime | None
    home: Path


class HomePage:
    """Serves the page and the ways from it to the apps.

    Args:
        sandbox_id: whose it is.
        facts: what is true now.
        ticket: makes the value of `?token=` that opens an app for who looks at the page.
    """

    def __init__(
        self,
        sandbox_id: str,
        facts: Callable[[], Awaitable[Facts]],
        ticket: Callable[[Request, str], str | None],
    ) -> None:
        self._sandbox_id = sandbox_id
        self._facts = facts
        self._ticket = ticket

    async def serve(self, request: Request) -> Answer:
        """Answer a request to the page's host that was let through."""
        fresh = {"Cache-Control": "no-store"}
        if request.method not in ("GET", "HEAD"):
            return Answer(405, {"Allow": "GET, HEAD"}, "only GET")
        if request.path == "/":
            answer = Answer(
                200,
                {**pages.html_headers(_SCRIPT_SOURCE), **fresh},
                _whole(self._sandbox_id, await self._live()),
            )
        elif request.path == LIVE:
            answer = Answer(200, {**pages.html_headers(), **fresh}, await self._live())
        elif request.path.startswith(GO):
            answer = await self._go(request, unquote(request.path.removeprefix(GO)))
        else:
            body, kind = pages.refusal(
                404, "no such page", "The sandbox's page is at /.", html=request.for_a_person
            )
            answer = Answer(404, {**kind, **fresh}, body)
        if request.method == "HEAD":
            return Answer(answer.status, answer.headers)
        return answer

    async def _go(self, request: Request, name: str) -> Answer:
        known = {app.name for app in (await self._facts()).apps}
        ticket = self._ticket(request, name) if name in known else None
        if ticket is None:
            body, kind = pages.refusal(
                404, "no such app", "This app is not published any more.", html=True
            )
            return Answer(404, kind, body)
        scheme = "https" if request.is_secure else "http"
        where = f"{scheme}://{name}.{request.headers['host']}/?token={ticket}"
        return Answer(303, {"Location": where, "Cache-Control": "no-store"})

    async def _live(self) -> str:
        facts = await self._facts()
        return "".join(
            (
                f"<h1>Sandbox {escape(self._sandbox_id)}</h1>",
                f'<p class="dim">{escape(_time_left(facts.expires_at))}</p>',
                "<h2>Apps</h2>",
                _apps(facts.apps),
                "<h2>Running commands</h2>",
                _commands(facts.processes),
                "<h2>Home</h2>",
                _usage(facts.home),
            )
        )


def _whole(sandbox_id: str, live: str) -> str:
    body = (
        f'<div id="live">{live}</div>'
        '<p id="gone" class="bad" hidden>The sandbox does not answer now; this page goes on '
        f"asking.</p><script>{_SCRIPT}</script>"
    )
    return pages.page(f"Sandbox {sandbox_id}", body)


def _apps(apps: Sequence[App]) -> str:
    if not apps:
        return '<p class="dim">None is published.</p>'
    rows = []
    for app in apps:
        state = (
            '<span class="good">answers</span>'
            if app.answers
            else '<span class="bad">does not answer</span>'
        )
        rows.append(
            f'<li><a href="{GO}{escape(app.name)}" target="_blank" rel="noopener">'
            f'{escape(app.name)}</a> <span class="dim">port {app.port}</span> {state}</li>'
        )
    return f"<ul>{''.join(rows)}</ul>"


def _commands(processes: Iterable[Process]) -> str:
    running = [process for process in processes if not process.done.is_set()]
    if not running:
        return '<p class="dim">None.</p>'
    rows = []
    for process in running[-MOST_COMMANDS:][::-1]:
        command = process.command
        if len(command) > COMMAND_CHARS:
            command = f"{command[:COMMAND_CHARS]}…"
        lines = "\n".join(filter(None, (_last_lines(process.stdout), _last_lines(process.stderr))))
        said = f"<pre>{escape(lines)}</pre>" if lines else ""
        rows.append(
            f"<li><code>{escape(command)}</code> "
            f'<span class="dim">for {_span(process.seconds)}</span>{said}</li>'
        )
    left_out = len(running) - MOST_COMMANDS
    more = f'<p class="dim">and {left_out} more</p>' if left_out > 0 else ""
    return f"<ul>{''.join(rows)}</ul>{more}"


def _last_lines(output: Output) -> str:
    piece = output.read(max(0, output.total - LAST_BYTES), LAST_BYTES)
    return "\n".join(piece.data.decode("utf-8", "replace").splitlines()[-LAST_LINES:])


def _usage(home: Path) -> str:
    try:
        stats = os.statvfs(home)
    except OSError:
        return '<p class="bad">It cannot be read.</p>'
    total, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    used = total - stats.f_bfree * stats.f_frsize
    share = used / total if total else 0
    return (
        f'<meter min="0" max="1" high="0.9" value="{share:.3f}"></meter>'
        f'<p class="dim">{_size(used)} of {_size(total)} used on its volume, {_size(free)} free</p>'
    )


def _time_left(expires_at: datetime | None) -> str:
    if expires_at is None:
        return "It lives until it is destroyed."
    left = (expires_at - datetime.fromtimestamp(time.time(), UTC)).total_seconds()
    if left <= 0:
        return "Its time is over."
    return f"It lives for {_span(left)} more, until {expires_at:%Y-%m-%d %H:%M} UTC."


def _span(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
