"""The OpenAPI 3.1 description of this API, as GET /openapi.json gives it (pure).

Paths and methods come from api/routes, bodies from api/openapi_schemas; owns which statuses a route answers with.
tests/api/test_openapi.py holds it against the code. Invariant: every route is described, with exactly its methods.
"""

from typing import Any

from api import routes
from api.openapi_schemas import ref, schemas, string
from api.routes import Route
from common import __version__

def document(strict: bool, keys_needed: bool) -> dict[str, Any]:
    """The description of a server that refuses unknown fields or not, and asks for keys or not."""
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Millpond",
            "version": __version__,
            "description": "OpenAI's protocol over a pool of MLX workers. A field that is null counts as absent; whole "
            "numbers are written without a fraction. Fields that nobody knows are listed in x-millpond-ignored.",
        },
        "servers": [{"url": "/"}],
        "paths": {_path(route): _operations(route, keys_needed) for route in routes.ALL},
        "components": {"schemas": schemas(strict)},
    }
    if keys_needed:
        found["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        found["security"] = [{"bearer": []}, {"header": []}]
        for route in routes.ALL:
            if route.open:
                for operation in found["paths"][_path(route)].values():
                    operation["security"] = []
    return found


# Paths


def _path(route: Route) -> str:
    return route.path.replace("{name:path}", "{name}")


_SUMMARIES: dict[Route, tuple[str, str]] = {
    routes.CHAT: ("chat", "A chat, whole or as a stream of events"),
    routes.COMPLETIONS: ("complete", "The continuation of raw text"),
    routes.TOKENIZE: ("tokenize", "A prompt or messages to token ids"),
    routes.DETOKENIZE: ("detokenize", "Token ids to text"),
    routes.MODELS: ("listModels", "What is served"),
    routes.MODEL: ("getModel", "One served model"),
    routes.HEALTH: ("health", "Whether this process lives and has joined the broker"),
    routes.READY: ("ready", "Whether some worker would serve a request"),
    routes.POOL: ("pool", "Workers, queue, limits and counts"),
    routes.METRICS: ("metrics", "Prometheus's text"),
    routes.OPENAPI: ("describe", "This document"),
}
_BODIES = {
    routes.CHAT: ("ChatRequest", "ChatReply", "ChatChunk"),
    routes.COMPLETIONS: ("CompletionRequest", "CompletionReply", "CompletionChunk"),
    routes.TOKENIZE: ("TokenizeRequest", "TokenizeReply", ""),
    routes.DETOKENIZE: ("DetokenizeRequest", "DetokenizeReply", ""),
    routes.MODELS: ("", "ModelList", ""),
    routes.MODEL: ("", "Model", ""),
    routes.HEALTH: ("", "Health", ""),
    routes.READY: ("", "Health", ""),
    routes.POOL: ("", "Pool", ""),
}


def _operations(route: Route, keys_needed: bool) -> dict[str, Any]:
    name, summary = _SUMMARIES[route]
    methods = [method.strip().lower() for method in route.allowed.split(",")]
    operations = {method: _operation(route, name, summary, keys_needed) for method in methods}
    if "head" in operations:
        operations["head"] |= {"operationId": f"{name}Head", "summary": f"The headers of: {summary}"}
        for answer in operations["head"]["responses"].values():
            answer.pop("content", None)
    return operations


def _operation(route: Route, name: str, summary: str, keys_needed: bool) -> dict[str, Any]:
    asked = _BODIES.get(route, ("", "", ""))[0]
    found: dict[str, Any] = {"operationId": name, "summary": summary, "responses": _responses(route)}
    if keys_needed and not route.open:
        found["responses"]["401"] = _error(401)
    if route is routes.MODEL:
        # A model's name may hold slashes, as hub ids do.
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": string(minLength=1)}]
    if asked:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref(asked)}}}
    return found


def _responses(route: Route) -> dict[str, Any]:
    _, answered, streamed = _BODIES.get(route, ("", "", ""))
    content: dict[str, Any] = {"application/json": {"schema": ref(answered) if answered else {"type": "object"}}}
    if route is routes.METRICS:
        content = {"text/plain": {"schema": {"type": "string"}}}
    headers: dict[str, Any] = {"x-request-id": {"schema": string(), "description": "The client's, or a new one."}}
    if "POST" in route.methods:
        headers["x-millpond-ignored"] = {"schema": string()}
    if streamed:
        content["text/event-stream"] = {
            "schema": string(),
            "x-event": ref(streamed),
            "example": "data: {…}\n\ndata: [DONE]\n\n",
        }
        for header in ("x-millpond-worker", "x-millpond-lane", "server-timing"):
            headers[header] = {"schema": string()}
    found: dict[str, Any] = {"200": {"description": "Done.", "headers": headers, "content": content}}
    return found | {str(status): _error(status) for status in _statuses(route)}


def _statuses(route: Route) -> list[int]:
    generates = route in (routes.CHAT, routes.COMPLETIONS)
    # What asks the broker can miss it.
    asks = generates or route in (routes.HEALTH, routes.READY, routes.POOL, routes.METRICS)
    return [
        *([400, 404, 408, 413] if "POST" in route.methods else []),
        *([404] if route is routes.MODEL else []),
        *([503] if asks else []),
        *([504, 529] if generates else []),
    ]


_ERRORS = {
    400: "A field is wrong (param names it), the prompt is too long, or the template refuses the messages.",
    401: "No valid key was shown.",
    404: "The model is not served.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    503: "Nobody serves this now, it waited too long, or generation failed.",
    504: "It took longer than the server allows.",
    529: "No place in the queue.",
}


def _error(status: int) -> dict[str, Any]:
    content = {"application/json": {"schema": ref("Error")}}
    found: dict[str, Any] = {"description": _ERRORS[status], "content": content}
    if status in (503, 529):
        found["headers"] = {"retry-after": {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds."}}
    return found
