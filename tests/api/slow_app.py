"""The application with a long last moment of starting: after gunicorn has taken its signals, before its loop runs."""

import time

from api import app
from common import logs
from falcon.asgi import App

SLOW_S = 1.5


def create_app() -> App:
    """As api.app has it, later. The log says when the moment has come."""
    made = app.create_app()
    logs.event("starting slowly")
    time.sleep(SLOW_S)
    return made
