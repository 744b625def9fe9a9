"""One structured log for every process: text for people, JSON lines for machines.

A line carries process, level, event words and fields (request label, request id, worker); never a body, a header value, a
key or a query string: callers pass fields by name, and there is no way to pass a request whole.
"""

import json
import logging
import sys
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

logger = logging.getLogger("millpond")


class TextFormat(logging.Formatter):
    """2026-11-29 19:04:29.123 broker    info  worker joined worker=demo-0 slots=16"""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {name}={_word(value)}" for name, value in _fields(record).items())
        line = f"{at}.{int(record.msecs):03d} {self._process:<8} {record.levelname.lower():<5} {record.getMessage()}{fields}"
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class JsonFormat(logging.Formatter):
    """{"at": 1764443069.123, "process": "broker", "level": "info", "event": "worker joined", "worker": "demo-0"}"""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": round(record.created, 3),
            "process": self._process,
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


# Per process: enough for a day of a busy instance, and bounded whatever happens.
FILE_BYTES = 8 * 2**20
OLDER_FILES = 2


def start(process: str, level: str = "info", form: str = "text", folder: Path | None = None) -> logging.Logger:
    """Send this process's log to stderr and, with a folder, to PROCESS.log in it; returns its logger.

    level: debug, info, warning, error; form: text, json. Call again after a fork: two processes must not share a file.
    A folder that cannot be written costs the file and not the process.
    """
    formatter = JsonFormat(process) if form == "json" else TextFormat(process)
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if folder is not None:
        try:
            path = folder / f"{process.replace('/', '_')}.log"
            handlers.append(RotatingFileHandler(path, maxBytes=FILE_BYTES, backupCount=OLDER_FILES, encoding="utf-8"))
        except OSError as error:
            print(f"millpond {process}: no log file in {folder}: {error.strerror}", file=sys.stderr)
    for handler in handlers:
        handler.setFormatter(formatter)
    root = logging.getLogger()
    older, root.handlers[:] = root.handlers[:], handlers
    for handler in older:
        if isinstance(handler, RotatingFileHandler):
            handler.close()
    root.setLevel(logging.WARNING)
    logger.setLevel(level.upper())
    return logger


def event(words: str, level: int = logging.INFO, /, **fields: Any) -> None:
    """Log one event with its fields: event("worker joined", worker="demo-0")."""
    # In one attribute: "name" and others are the record's own.
    logger.log(level, words, extra={"fields": fields})


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _word(value: Any) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c.isspace() or c in '"=' for c in text) else text
