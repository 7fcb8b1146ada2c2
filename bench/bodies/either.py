"""ASGI middleware: one server that is stock's for some requests and has ours for the others."""

from __future__ import annotations

from continuum_connector.middleware import App, ProgramMiddleware, Receive, Scope, Send

STOCK = b"x-bench-stock"


class Either:
    """With the header STOCK a request passes by ProgramMiddleware, without it through."""

    def __init__(self, app: App) -> None:
        self._stock = app
        self._ours = ProgramMiddleware(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = (name for name, _ in scope.get("headers", ()))
        await (self._stock if STOCK in names else self._ours)(scope, receive, send)
