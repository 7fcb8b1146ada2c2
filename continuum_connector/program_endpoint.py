"""ASGI middleware: an operator with a key says that a program is over, without another turn.

    CONTINUUM_ADMIN_KEY=SECRET vllm serve MODEL ... \
        --middleware continuum_connector.program_endpoint.ProgramEndpoint

    DELETE /continuum/programs/KEY     KEY as answers carry it: job:run-17

It goes to every engine on the way of vLLM's reset of its prefix cache, as an object in the place of
`reset_connector`. Our scheduler resets nothing then; where another serves, nothing is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from continuum_connector.middleware import (
    Endpoint,
    Receive,
    RequestError,
    Scope,
    engine_of,
    path_of,
)
from continuum_connector.vllm import attach


class ProgramEndpoint(Endpoint):
    """A DELETE ends the program with that key."""

    path = "/continuum/programs/"
    methods: ClassVar[Mapping[str, str]] = {"DELETE": "end a program"}

    def serves(self, path: str) -> bool:
        return path.startswith(self.path) and path != self.path

    async def answer(self, scope: Scope, receive: Receive) -> Mapping[str, Any]:
        key = path_of(scope).removeprefix(self.path)
        client = engine_of(scope, "no program ended")
        if not attach.is_in(client.vllm_config):
            raise RequestError(
                503,
                "this server's scheduler is not ours, so no program ended; leave --scheduler-cls "
                "out, or send is_last_step with the last turn",
            )
        try:
            is_unknown = await client.reset_prefix_cache(False, {"end_program": key})
        except Exception as error:  # whatever an engine raises, or that it is gone
            what = f"{type(error).__name__}: {error}"
            raise RequestError(
                503, f"an engine failed ({what}), so the program may go on; send it again"
            ) from error
        if is_unknown:
            raise RequestError(
                404,
                f"no program {key!r} is known, so none ended; send the key that answers carry as "
                "kv_transfer_params.continuum.program, such as job:run-17",
            )
        return {"program": key, "ended": True}
