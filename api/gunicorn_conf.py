"""gunicorn's configuration for the API: python -m gunicorn -c api/gunicorn_conf.py 'api.app:create_app()'.

Reads the environment through ApiSettings, so that what an operator sets means the same here and in the application.
Owns what concerns the server and its processes. Invariant: the application's own drain ends before gunicorn's
patience does.
"""

import gc
import logging
import os
import signal
import sys
from typing import Any

from gunicorn.glogging import Logger

from api.connections import Connections, bound_listeners
from api.drain import CutCounter, Drain, hold_signals
from api.keys import read_keys
from api.settings import ApiSettings
from common import changes, logs
from common.errors import ConfigError
from common.models import check_folder
from common.processes import end_with_parent
from common.runtime import runtime
from common.settings import load

try:
    _settings = load(ApiSettings, os.environ)
    for _model in changes.read(runtime(_settings.port, _settings.runtime)).models(_settings.model):
        check_folder(_model)
    read_keys(_settings)
except ConfigError as error:
    print(f"millpond: {error}", file=sys.stderr)
    sys.exit(2)

_cuts = CutCounter()


class Journal(Logger):
    """gunicorn's own words in our log's form, warnings and worse."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        logs.start("api", _settings.log_level, _settings.log_format)
        self.error_log.handlers = logging.getLogger().handlers


bind = [f"[{_settings.host}]:{_settings.port}" if ":" in _settings.host else f"{_settings.host}:{_settings.port}"]
workers = _settings.api_processes
worker_class = "asgi"
asgi_lifespan = "on"
asgi_loop = "auto"
http_parser = "python"
# An application that has been cancelled needs no grace; this only bounds what would not end by itself.
asgi_disconnect_grace_period = 3
# The client's own headers are a dozen; proxies add a few.
limit_request_fields = 64
keepalive = _settings.keep_alive
# Two seconds for the last events to leave after the application has cut them.
graceful_timeout = int(_settings.shutdown_timeout) + 3
# Also how long a body may pause, which the application bounds itself, so it has to be the longer one.
timeout = max(60, graceful_timeout, int(_settings.body_timeout) + 5)
preload_app = False
reuse_port = False
control_socket_disable = True
accesslog = None
errorlog = "-"
loglevel = "warning"
logger_class = Journal
proc_name = "millpond-api"


def on_starting(server: Any) -> None:
    """The master's first words."""
    end_with_parent()
    if server.cfg.http_protocols != ["h1"]:
        # GUNICORN_CMD_ARGS goes before this file. The server's connections for HTTP/2 are others than ours, without our
        # deadlines.
        logging.getLogger("gunicorn.error").error("millpond speaks HTTP/1.1 only: leave gunicorn's http_protocols at h1")
        sys.exit(1)


def when_ready(server: Any) -> None:
    """The master ignores a second TERM; ours makes the workers end at once."""
    first = signal.getsignal(signal.SIGTERM)
    asked: list[int] = []

    def terminate(number: int, frame: Any) -> None:
        if os.getpid() != server.pid:
            # Just forked and not a worker yet: gunicorn's handler would note it in a copy of the master's memory.
            os._exit(0)
        if asked:
            server.kill_workers(signal.SIGQUIT)
        else:
            # What reloads have cut before is not this end's doing.
            _cuts.reset()
        asked.append(number)
        if callable(first):
            first(number, frame)

    signal.signal(signal.SIGTERM, terminate)


def post_fork(server: Any, worker: Any) -> None:
    """In each worker, before anything of ours."""
    hold_signals()
    # The master may be killed without a word as well; its pipe is its parent's, so the worker watches the same one.
    end_with_parent()
    bound_listeners(worker.sockets, _settings.stall_timeout)


def post_worker_init(worker: Any) -> None:
    """In each worker, when the application is there and the loop does not run yet."""
    app = worker.asgi
    connections = Connections(_settings.header_timeout, _settings.stall_timeout)
    connections.install()
    Drain(worker, app.lifecycle, app.link, connections, _cuts, _settings.shutdown_timeout).listen()
    # What was imported stays for good. Looked through at each full collection, it held up every stream for some 50 ms.
    gc.collect()
    gc.freeze()


def on_exit(server: Any) -> None:
    """Exit status 1 tells that replies were cut."""
    if _cuts.total:
        sys.exit(1)
