"""The service on Starlette and uvicorn (extra ``visdial``): routes, and replies as JSON, those to no HTTP included."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchrl_lang.envs.visual_dialogue.protocol import BATCH, ROUTES, error_reply
from torchrl_lang.envs.visual_dialogue.service import DialogueService

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

__all__ = ["web_app", "web_server"]

_LOG = logging.getLogger(__name__)
_KEEP_ALIVE_SECONDS = 75
_SHUTDOWN_SECONDS = 30
_RETRY_SECONDS = "1"


def web_app(service: DialogueService) -> Starlette:
    """The Starlette application of a service."""
    try:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.requests import ClientDisconnect, Request
        from starlette.responses import Response
        from starlette.routing import Route
    except ImportError as error:
        raise ImportError("DialogueServer needs Starlette: pip install 'torchrl-lang[visdial]'.") from error

    def written(content: Any, status: int = 200) -> Response:
        headers = {"retry-after": _RETRY_SECONDS} if status == 503 else {}
        return Response(json.dumps(content), status, headers, media_type="application/json")

    def answering(route: str) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            return written(*await service.answer(route, request.headers, request.stream()))

        return answer

    async def health(request: Request) -> Response:
        return written(service.health())

    async def no_route(request: Request, error: Any) -> Response:
        return written(error_reply(f"{request.method} {request.url.path}: {error.detail}"), error.status_code)

    async def incomplete(request: Request, error: Exception) -> Response:
        return written(error_reply("the body ended too early", "body"), 400)

    async def failed(request: Request, error: Exception) -> Response:
        _LOG.error("The server failed on a request of %s.", request.url.path, exc_info=error)
        return written(error_reply("the server failed on this request"), 500)

    posts = [*(name for name, kind in ROUTES.items() if not kind.batched_only), BATCH]
    routes = [Route("/health", health), *(Route(f"/{name}", answering(name), methods=["POST"]) for name in posts)]
    handlers: Any = {HTTPException: no_route, ClientDisconnect: incomplete, Exception: failed}
    return Starlette(routes=routes, exception_handlers=handlers)


def web_server(app: Starlette) -> uvicorn.Server:
    """A uvicorn server of an application."""
    try:
        import uvicorn
    except ImportError as error:
        raise ImportError("DialogueServer needs uvicorn: pip install 'torchrl-lang[visdial]'.") from error
    config = uvicorn.Config(
        app,
        http=_protocol(),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # the service logs what matters
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    return uvicorn.Server(config)


def _protocol() -> Any:
    """How uvicorn reads HTTP: with errors as JSON, and replies to clients that close their side before the reply."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        def send_400_response(self, msg: str) -> None:
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                body = json.dumps(error_reply(msg)).encode()
                headers = [
                    ("content-type", "application/json"),
                    ("content-length", str(len(body))),
                    ("connection", "close"),
                ]
                for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def eof_received(self) -> Any:
            """Whether a reply is still to come, so that the connection stays open."""
            begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
            if begun or self.conn.their_state is h11.SEND_BODY:
                self.send_400_response("The request ended too early.")
            answering = self.cycle is not None and not self.cycle.response_complete
            if answering:
                self.cycle.keep_alive = False
            return answering

    return Protocol
