"""`python -m broker`: one broker for one port. Exit status 0 after SIGTERM, 2 when it cannot start (one line says why)."""

import logging
import os
import secrets
import signal
import sys
import time

import zmq

from broker.loop import Loop
from broker.settings import BrokerSettings
from broker.switchboard import Switchboard
from common import logs, runtime, settings, sockets
from common.errors import ConfigError
from common.processes import end_with_parent


def main() -> int:
    """Run until SIGTERM or SIGINT."""
    try:
        chosen = settings.load(BrokerSettings, os.environ)
        end_with_parent()
        place = runtime.runtime(chosen.port, chosen.runtime)
        runtime.create(place)
        logs.start("broker", chosen.log_level, chosen.log_format, place.logs)
        lock = runtime.hold(place.broker_lock)
    except ConfigError as error:
        print(f"millpond broker: {error}", file=sys.stderr)
        return 2
    with lock:
        context = sockets.context()
        epoch = secrets.token_hex(8)
        switchboard = Switchboard(chosen, epoch, time.monotonic())
        try:
            loop = Loop(context, place.front, place.back, switchboard)
        except zmq.ZMQError as error:
            print(f"millpond broker: cannot bind in {place.folder}: {error}", file=sys.stderr)
            return 2
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: loop.stop())
        logs.event("broker serves", logging.INFO, folder=str(place.folder), epoch=epoch)
        loop.run()
        context.term()
    return 0


if __name__ == "__main__":
    sys.exit(main())
