"""A streaming client that notes everything: what it got, when, and how it ended."""

import json
import threading
import time
from typing import Any

import httpx

from scripts.harness import Harness, wait_for


class Stream:
    """One streamed chat, read in a thread of its own."""

    def __init__(self, harness: Harness, content: str, **fields: Any) -> None:
        self.status = 0
        self.text = ""
        self.pieces = 0
        self.error: dict[str, Any] | None = None
        self.finish = ""
        self.done = False
        self.cut = False
        self.ended_at = 0.0
        self.headers: dict[str, str] = {}
        self._url = harness.url + "/v1/chat/completions"
        self._body = {"model": "m", "messages": [{"role": "user", "content": content}], "stream": True, **fields}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as reply:
                self.status = reply.status_code
                self.headers = dict(reply.headers)
                if reply.status_code != 200:
                    self.error = json.loads(reply.read())["error"]
                    return
                for line in reply.iter_lines():
                    self._line(line)
        except httpx.HTTPError:
            self.cut = True
        finally:
            self.ended_at = time.monotonic()

    def _line(self, line: str) -> None:
        if not line.startswith("data: "):
            return
        if line == "data: [DONE]":
            self.done = True
            return
        event = json.loads(line[6:])
        if "error" in event:
            self.error = event["error"]
        for choice in event.get("choices", ()):
            text = choice["delta"].get("content")
            if text:
                self.text += text
                self.pieces += 1
            self.finish = choice["finish_reason"] or self.finish

    def flowing(self, pieces: int = 1) -> "Stream":
        """Wait until so many pieces have come."""
        wait_for(lambda: self.pieces >= pieces or self.ended_at, 30, "pieces")
        assert self.pieces >= pieces, (self.status, self.error)
        return self

    def over(self, timeout_s: float = 30.0) -> "Stream":
        """Wait until it has ended."""
        self._thread.join(timeout_s)
        assert self.ended_at, "the stream hangs"
        return self

    @property
    def whole(self) -> bool:
        """Whether it ended as a reply ends."""
        return self.done and bool(self.finish) and not self.error and not self.cut

    @property
    def failed(self) -> bool:
        """Whether it ended as CONTRACT §8 says of a failure after the 200: an error event, then a cut."""
        return self.error is not None and self.cut and not self.done and not self.finish
