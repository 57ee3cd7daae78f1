"""What becomes of one request at the gateway: which app it is for, and whether it may go there.

Everything is decided here, from the request's head alone; Caddy does as it is told. A token opens an
app as `Authorization: Bearer`, as `?token=`, which also sets its cookie, or as that cookie. The app
sees none of the three, and what is its own of the same kinds goes through.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, unquote_plus

from in_pod_server.gateway import pages
from in_pod_server.gateway.access import Access, Grant, cookie_of, now

COOKIE: Final = "podpipe_app"
COOKIE_SECONDS: Final = 86400
TICKET_SECONDS: Final = 60.0
PUBLIC: Final = ("/docs", "/redoc", "/openapi.json")
READS: Final = ("GET", "HEAD", "OPTIONS")
PAGE: Final = ""
"""The sandbox's own page, in the place of an app's name."""

_BEARER: Final = re.compile(r"(?i:bearer) +([A-Za-z0-9_~+/.=-]+)")
_ORIGIN: Final = re.compile(r"https?://([a-z0-9.-]+)(?::\d+)?", re.IGNORECASE)
_PORT: Final = re.compile(r":\d*\Z")

UPSTREAM: Final = "X-Podpipe-Upstream"
SET_COOKIE: Final = "X-Podpipe-Set-Cookie"
PATH: Final = "X-Podpipe-Path"
QUERY: Final = "X-Podpipe-Query"
"""What the app sees in place of an address that holds a token of ours: all the rest, as it came. The
path is a replacement of a regular expression, in which `$` is written twice."""


@dataclass(frozen=True, slots=True)
class Request:
    """The head of a request; header names in lower case, the host as the client wrote it."""

    method: str
    uri: str
    headers: Mapping[str, str]
    upgrade: str = ""

    @property
    def path(self) -> str:
        """Its path, undecoded."""
        return self.uri.partition("?")[0]

    @property
    def for_a_person(self) -> bool:
        """Whether a browser shows what is answered."""
        return "text/html" in self.headers.get("accept", "") and not self.upgrade

    @property
    def is_secure(self) -> bool:
        """Whether the client speaks TLS, to the proxy in front of us."""
        return self.headers.get("x-forwarded-proto") == "https"

    def origin_is_foreign(self, base: str) -> bool:
        """Whether a page of neither this sandbox nor its apps sends it."""
        origin = self.headers.get("origin")
        if origin is None:
            return False
        match = _ORIGIN.fullmatch(origin)
        host = match[1].lower() if match else ""
        return host != base and not (
            host.endswith(f".{base}") and host.count(".") <= base.count(".") + 1
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What the gateway is to do: status 200 lets the request through, any other one is the reply."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""
    grant: Grant | None = None
    """By which it is let through; None for what is public."""


class Gatekeeper:
    """Decides every request.

    Args:
        sandbox_id: the second label of its apps' hosts, the first of its own page's.
        access: who may open what.
        port_of: an app's port; None for one that is not published.
        way: the upstream that leads to an app, of whose grant opened it; None for what is public.
        page: where the sandbox's own page is served, as an upstream.
        on_use: called for each request to an app that was let through.
    """

    def __init__(
        self,
        sandbox_id: str,
        access: Access,
        port_of: Callable[[str], int | None],
        way: Callable[[str, int, Grant | None], str],
        page: str,
        on_use: Callable[[], None] = lambda: None,
    ) -> None:
        self._sandbox_id = sandbox_id
        self._access = access
        self._port_of = port_of
        self._way = way
        self._page = page
        self._on_use = on_use
        self._tickets: dict[str, tuple[str, str, float]] = {}

    def decide(self, request: Request) -> Answer:
        """What becomes of a request."""
        found = self._app(request.headers.get("host", ""))
        if found is None:
            return _refused(request, 404, "no such app", "Nothing is published under this address.")
        app, base = found
        port = None if app == PAGE else self._port_of(app)
        if app != PAGE and port is None:
            return _refused(
                request, 404, "no such app", f"No app is published as “{app}” in this sandbox."
            )
        answer = self._admitted(request, app, base)
        if answer.status != 200:
            return answer
        upstream = self._page
        if port is not None:
            self._on_use()
            upstream = self._way(app, port, answer.grant)
        return Answer(200, {**answer.headers, UPSTREAM: upstream})

    def _app(self, host: str) -> tuple[str, str] | None:
        """The app that a host names, and the host of the sandbox's page; None for another's."""
        labels = _PORT.sub("", host.lower()).split(".")
        if not self._sandbox_id or "" in labels:
            return None
        if len(labels) > 1 and labels[0] == self._sandbox_id:
            return PAGE, ".".join(labels)
        if len(labels) > 2 and labels[1] == self._sandbox_id:
            return labels[0], ".".join(labels[1:])
        return None

    def _admitted(self, request: Request, app: str, base: str) -> Answer:
        when = now()
        path, _, query = request.uri.partition("?")
        bearer = _BEARER.fullmatch(request.headers.get("authorization", ""))
        by_bearer = self._access.of_token(bearer[1]) if bearer else None
        cookies, presented = _split_cookies(request.headers.get("cookie", ""))
        by_cookie = [grant for each in presented if (grant := self._access.of_cookie(each))]
        theirs = {"Cookie": cookies, "Authorization": request.headers.get("authorization", "")}
        if app == PAGE:  # ours: it leads on to the apps by what it was opened with
            theirs["Cookie"] = request.headers.get("cookie", "")
        elif by_bearer:  # whatever it opens, the app does not see it
            theirs["Authorization"] = ""

        mine, own = self._split_query(query, app)
        if mine:
            if _leads_away(path):
                return Answer(400, {}, "bad path")
            cookie, grant = mine
            set_cookie = _set_cookie(cookie, grant, secure=request.is_secure)
            if request.for_a_person and request.method in ("GET", "HEAD"):
                clean = path + ("?" + "&".join(own) if own else "")
                return Answer(
                    303,
                    {
                        "Location": clean,
                        "Set-Cookie": set_cookie,
                        "Referrer-Policy": "no-referrer",
                        "Cache-Control": "no-store",
                    },
                )
            # Caddy leaves out what a query ends with, a "=" too.
            rest = {PATH: path.replace("$", "$$"), QUERY: "?" + "".join(f"{part}&" for part in own)}
            return Answer(200, {**theirs, SET_COOKIE: set_cookie, **rest}, grant=grant)
        if by_bearer and by_bearer.opens(app, when):
            return Answer(200, theirs, grant=by_bearer)
        if opening := [grant for grant in by_cookie if grant.opens(app, when)]:
            writes = request.method not in READS or request.upgrade
            if writes and request.origin_is_foreign(base):
                return _refused(
                    request, 403, "cross-origin request refused", "Another site asked for this."
                )
            return Answer(200, theirs, grant=max(opening, key=Grant.lasts))
        if _leads_away(path):
            return Answer(400, {}, "bad path")
        public = app != PAGE and request.method == "GET" and not request.upgrade
        if public and unquote(path) in PUBLIC:
            return Answer(200, theirs)
        return _refused(
            request,
            401,
            "token required",
            "Open it by the link that you were given, or type its token.",
            {"WWW-Authenticate": 'Bearer realm="sandbox"'},
            form=True,
        )

    def _split_query(self, query: str, app: str) -> tuple[tuple[str, Grant] | None, list[str]]:
        """The cookie and grant that a `token` of ours in a query brings, and the rest of the query."""
        mine, own = None, []
        for part in query.split("&") if query else []:
            found = self._presented(part, app) if _names_token(part) else None
            if found:
                mine = mine or found
            else:
                own.append(part)
        return mine, own

    def _presented(self, part: str, app: str) -> tuple[str, Grant] | None:
        value = unquote(part.partition("=")[2])
        if ticket := self._tickets.pop(value, None):
            cookie, ticket_app, deadline = ticket
            if ticket_app != app or time.monotonic() > deadline:
                return None
        else:
            cookie = cookie_of(value)
        grant = self._access.of_cookie(cookie)
        return (cookie, grant) if grant and grant.opens(app, now()) else None

    def ticket(self, request: Request, app: str) -> str | None:
        """A value of `?token=` that takes whoever looks at the page to an app, once and soon.

        A cookie is one host's own, and nobody can get the token back from it.

        Args:
            request: for the page, let through.
            app: to be opened.
        """
        when = time.monotonic()
        self._tickets = {t: held for t, held in self._tickets.items() if held[2] > when}
        bearer = _BEARER.fullmatch(request.headers.get("authorization", ""))
        _, presented = _split_cookies(request.headers.get("cookie", ""))
        if bearer:
            presented.append(cookie_of(bearer[1]))
        for cookie in presented:
            grant = self._access.of_cookie(cookie)
            if grant and grant.opens(app, now()):
                ticket = secrets.token_urlsafe(24)
                self._tickets[ticket] = (cookie, app, when + TICKET_SECONDS)
                return ticket
        return None


def _names_token(part: str) -> bool:
    return unquote_plus(part.partition("=")[0]) == "token"


def _split_cookies(header: str) -> tuple[str, list[str]]:
    """The app's own cookies as a header, and the values of ours, of which some may be tossed in."""
    own, mine = [], []
    for part in header.split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            mine.append(value)
        elif part.strip():
            own.append(part.strip())
    return "; ".join(own), mine[:16]


def _set_cookie(cookie: str, grant: Grant, *, secure: bool) -> str:
    age = COOKIE_SECONDS
    if grant.until:
        age = max(0, min(age, int((grant.until - now()).total_seconds())))
    only_tls = "; Secure" if secure else ""
    return f"{COOKIE}={cookie}; Path=/; HttpOnly; SameSite=Lax; Max-Age={age}{only_tls}"


def _leads_away(path: str) -> bool:
    """Whether a browser that is sent to the path would leave the host."""
    return path.startswith("//") or "\\" in unquote(path)


def _refused(
    request: Request,
    status: int,
    error: str,
    say: str,
    headers: Mapping[str, str] | None = None,
    *,
    form: bool = False,
) -> Answer:
    body, kind = pages.refusal(status, error, say, html=request.for_a_person, form=form)
    return Answer(status, {**(headers or {}), **kind, "Cache-Control": "no-store"}, body)
