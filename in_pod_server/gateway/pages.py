"""What the gateway itself says: a small page for a person, JSON for a program."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Final

RETRY_SECONDS: Final = 2

STYLE: Final = """\
:root{color-scheme:light dark;--line:#8884;--dim:#616161;--good:#1b7a3d;--bad:#b03a10}
@media(prefers-color-scheme:dark){:root{--dim:#a8a8a8;--good:#62c98b;--bad:#f19066}}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:46rem;padding:1.5rem 1rem}
h1{font-size:1.25rem;margin:0 0 .25rem;overflow-wrap:anywhere}
h2{font-size:1rem;margin:1.75rem 0 .5rem}
p{margin:.25rem 0}
a{color:LinkText}
.dim{color:var(--dim)}
.good{color:var(--good)}
.bad{color:var(--bad)}
ul{list-style:none;margin:0;padding:0}
li{border-top:1px solid var(--line);padding:.6rem 0}
code,pre{font:13px/1.45 ui-monospace,monospace}
code{overflow-wrap:anywhere}
pre{margin:.4rem 0 0;overflow-x:auto;white-space:pre-wrap;overflow-wrap:anywhere}
meter{width:100%;height:.8rem}
input,button{font:inherit;padding:.4rem .6rem;max-width:100%}
"""

_FORM: Final = (
    '<form method="get"><p><input name="token" type="password" autocomplete="off" required '
    'aria-label="Token"> <button>Open</button></p></form>'
)
_BY_STATUS: Final = {401: "A token is needed", 403: "Refused", 404: "Not here", 503: "Not up yet"}


def refusal(
    status: int, error: str, say: str, *, html: bool, form: bool = False
) -> tuple[str, Mapping[str, str]]:
    """A body that refuses a request, and the headers of its kind.

    Args:
        status: the HTTP status.
        error: for a program.
        say: for a person.
        html: which of the two.
        form: whether a person may type a token.
    """
    if not html:
        return json.dumps({"error": error}) + "\n", {"Content-Type": "application/json"}
    title = _BY_STATUS.get(status, error)
    again = f'<meta http-equiv="refresh" content="{RETRY_SECONDS}">' if status == 503 else ""
    body = f"<h1>{escape(title)}</h1><p>{escape(say)}</p>{_FORM if form else ''}"
    return page(title, body, again), html_headers()


def page(title: str, body: str, head: str = "") -> str:
    """A whole page; the body is HTML already."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title>{head}<style>{STYLE}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def html_headers(script: str = "") -> Mapping[str, str]:
    """Headers of a page that takes nothing from elsewhere.

    Args:
        script: the source that may run, as the policy names it; empty for none.
    """
    scripts = f" script-src {script}; connect-src 'self';" if script else ""
    return {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline';"
        f"{scripts} form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
