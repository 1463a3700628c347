"""Who may see the page, and what a browser may do with it."""

from __future__ import annotations

import hmac
import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.consumers.view.config import ViewSettings, is_loopback

COOKIE = "tidemill_view"
OPEN = ("/enter", "/static/")
"""Paths that are answered without the token."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class Guarded:
    """An ASGI application behind a check of the host name and of the token, with security headers on each answer."""

    def __init__(self, app: ASGIApp, settings: ViewSettings) -> None:
        self._app, self._settings = app, settings
        self._token = settings.token.get_secret_value()
        self._names = {settings.host, *settings.names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refusal = self._refusal(Request(scope))
        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> Response | None:
        name = host_name(Headers(scope=request.scope).get("host", ""))
        if not (self._settings.behind_proxy or is_loopback(name) or name in self._names):
            return PlainTextResponse(f"this page is not called {name!r}: add the name to view.names\n", 421)
        # The path that is routed by: a URL is made of the Host header too.
        if not self._token or request.scope["path"].startswith(OPEN):
            return None
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        shown = bearer if kind.lower() == "bearer" else request.cookies.get(COOKIE, "")
        if same(shown, self._token):
            return None
        if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/enter", 303)
        return PlainTextResponse("give the token (view.token): Authorization: Bearer TOKEN\n", 401)


def host_name(header: str) -> str:
    """The name in a Host header, in lower case; empty where it names none."""
    if not re.fullmatch(r"[\w.-]+(:\d+)?|\[[0-9a-fA-F:.]+\](:\d+)?", header, re.ASCII):
        return ""
    return urlsplit(f"//{header}").hostname or ""


def same(shown: str, token: str) -> bool:
    """Whether two secrets are equal, in a time that does not tell how much of them is."""
    return hmac.compare_digest(shown.encode(), token.encode())
