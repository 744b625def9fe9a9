"""Putting the API together: create_app() for gunicorn.

Called once in each API process, after the fork. Knows every part and none of their work. Invariant: nothing here
talks to the broker before the event loop runs.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import falcon.asgi
import falcon.media
import msgspec

from api import openapi, routes
from api.broker_link import BrokerLink
from api.extract_json import STACK_NEEDED
from api.generate import Generation
from api.keys import read_keys
from api.middleware import Edge, Lifecycle
from api.resources.chat import Chat
from api.resources.completions import Completions
from api.resources.health import Health, Ready
from api.resources.metrics import Metrics
from api.resources.models import Models
from api.resources.openapi import OpenApi
from api.resources.pool import Pool
from api.resources.tokenize import Detokenize, Tokenize
from api.responses import RequestError
from api.served import read_model
from api.settings import ApiSettings
from common import changes, logs
from common.runtime import runtime
from common.settings import load


class MillpondApi(Edge):
    """The whole ASGI application, and the parts its process's end needs."""

    def __init__(self, app: falcon.asgi.App, settings: ApiSettings, lifecycle: Lifecycle, link: BrokerLink) -> None:
        def count(error: RequestError) -> None:
            link.refused[str(error.status)] += 1

        super().__init__(app, settings, lifecycle, count)
        self.settings = settings
        self.lifecycle = lifecycle
        self.link = link


def create_app() -> MillpondApi:
    """The application of this process. Raises ConfigError."""
    settings = load(ApiSettings, os.environ)
    folder = runtime(settings.port, settings.runtime).logs
    logs.start(f"api-{os.getpid()}", settings.log_level, settings.log_format, folder if folder.is_dir() else None)
    sys.setrecursionlimit(max(sys.getrecursionlimit(), STACK_NEEDED))
    return build(settings)


def build(settings: ApiSettings) -> MillpondApi:
    """The application for these settings. Raises ConfigError."""
    place = runtime(settings.port, settings.runtime)
    models = {choice.name: read_model(choice) for choice in changes.read(place).models(settings.model)}
    link = BrokerLink(place.front, f"api-{os.getpid()}")
    threads = ThreadPoolExecutor(settings.prompt_threads, "prompt")
    lifecycle = Lifecycle(link.start, lambda: _stop(link, threads))
    generation = Generation(models, link, threads, settings.max_prompt, settings.strict_fields)
    app = falcon.asgi.App()
    app.add_error_handler(Exception, _leave_to_the_edge)
    # One form of JSON for all routes, the compact one.
    json_handler = falcon.media.JSONHandler(dumps=lambda value: msgspec.json.encode(value).decode())
    app.resp_options.media_handlers[falcon.MEDIA_JSON] = json_handler
    resources: dict[routes.Route, Any] = {
        routes.CHAT: Chat(generation, settings),
        routes.COMPLETIONS: Completions(generation, settings),
        routes.TOKENIZE: Tokenize(generation, settings),
        routes.DETOKENIZE: Detokenize(generation, settings),
        routes.MODELS: (entries := Models(generation.catalog, link)),
        routes.MODEL: entries,
        routes.HEALTH: Health(link),
        routes.READY: Ready(link, lifecycle),
        routes.POOL: Pool(link),
        routes.METRICS: Metrics(link),
        routes.OPENAPI: OpenApi(openapi.document(settings.strict_fields, read_keys(settings).needed)),
    }
    for route, resource in resources.items():
        app.add_route(route.path, resource)
    return MillpondApi(app, settings, lifecycle, link)


def _stop(link: BrokerLink, threads: ThreadPoolExecutor) -> None:
    link.stop()
    threads.shutdown(wait=False, cancel_futures=True)


async def _leave_to_the_edge(
    req: falcon.asgi.Request, resp: falcon.asgi.Response, error: Exception, params: dict[str, Any]
) -> NoReturn:
    raise error
