"""Which paths are routes and which methods they take (pure).

Stated once: the middleware refuses by this table before a body is read, and app.py adds exactly these to Falcon.
Invariant: a path that matches here is one Falcon has a resource for.
"""

from dataclasses import dataclass

MODEL_PREFIX = "/v1/models/"


@dataclass(frozen=True)
class Route:
    """path: as Falcon writes it. open: needs no key even when keys are set."""

    path: str
    methods: tuple[str, ...]
    open: bool = False

    @property
    def allowed(self) -> str:
        """The Allow header."""
        return ", ".join(sorted({*self.methods, *(("HEAD",) if "GET" in self.methods else ())}))


CHAT = Route("/v1/chat/completions", ("POST",))
COMPLETIONS = Route("/v1/completions", ("POST",))
TOKENIZE = Route("/tokenize", ("POST",))
DETOKENIZE = Route("/detokenize", ("POST",))
MODELS = Route("/v1/models", ("GET",))
MODEL = Route("/v1/models/{name:path}", ("GET",))
HEALTH = Route("/health", ("GET",), open=True)
READY = Route("/health/ready", ("GET",), open=True)
POOL = Route("/v1/pool", ("GET",))
METRICS = Route("/metrics", ("GET",))
OPENAPI = Route("/openapi.json", ("GET",))

ALL = (CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE, MODELS, MODEL, HEALTH, READY, POOL, METRICS, OPENAPI)
_EXACT = {route.path: route for route in ALL if route is not MODEL}


def origin_form(target: str) -> str:
    """A target's path: clients behind a proxy may name the whole URL (RFC 9112, 3.2.2)."""
    if not target[:8].lower().startswith(("http://", "https://")):
        return target
    return "/" + target.partition("://")[2].partition("/")[2]


def normal_path(path: str) -> str:
    """Without its trailing slash."""
    return path[:-1] if len(path) > 1 and path.endswith("/") else path


def find(path: str) -> Route | None:
    """The route of a normal path."""
    route = _EXACT.get(path)
    if route is None and path.startswith(MODEL_PREFIX) and len(path) > len(MODEL_PREFIX):
        return MODEL
    return route
