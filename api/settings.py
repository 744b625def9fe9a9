"""What an operator can set about the API process; each number with its reason.

Read once, by gunicorn_conf and by create_app(), from the environment that `serve` gives the API; frozen and passed in
from there. Knows nothing of the broker's or the workers' settings. Invariant: two reads of one environment are equal.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from common.models import MODEL, ModelChoice
from common.settings import boolean, byte_size, choice, integer, listing, seconds, setting, text

# A second process pays only where a second core is free for it; past four the broker's one thread is the limit.
DEFAULT_PROCESSES = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class ApiSettings:
    """MILLPOND_* of the API."""

    host: str = setting(text("an address to listen on"), "127.0.0.1", "address to listen on")
    port: int = setting(integer(0, 65535), 8080, "port to listen on")
    api_processes: int = setting(integer(1, 64), DEFAULT_PROCESSES, "API processes")
    model: list[ModelChoice] = setting(listing(MODEL), [], "models served: PATH, hub id, or name=either")
    # What one reply may take unless the operator says otherwise: OpenJev's cap, a few pages of text.
    max_tokens: int = setting(integer(1, 2**31 - 1), 8192, "largest max_tokens of a request; larger ones are clamped")
    # A prompt of this size already takes minutes to read on a CPU; the model's own context limits further.
    max_prompt: int = setting(integer(1, 2**31 - 1), 32768, "longest prompt in tokens")
    # Far above any prompt that fits max_prompt, and what one message to the broker may hold.
    max_body_bytes: int = setting(byte_size(), 64 * 2**20, "largest request body")
    # The usual proxy timeout: a body that needs longer would be cut there as well.
    body_timeout: float = setting(seconds(0.05, 3600), 60.0, "seconds for a whole request body to arrive")
    # Headers fit one packet; ten seconds are several retransmissions of it.
    header_timeout: float = setting(
        seconds(0.05, 3600), 10.0, "seconds for the headers of a connection's first request"
    )
    # Docker and systemd kill after 10 to 90 s; a reply of a thousand tokens is over by then.
    shutdown_timeout: float = setting(seconds(0, 3600), 30.0, "seconds for running replies to finish at shutdown")
    strict_fields: bool = setting(boolean(), False, "answer 400 to request fields that would be ignored")
    log_level: str = setting(choice("debug", "info", "warning", "error"), "info", "least level that is logged")
    log_format: str = setting(choice("text", "json"), "text", "form of log lines")
    api_keys: list[str] = setting(listing(text("a key")), [], "API keys, comma-separated; none: open to everyone")
    api_keys_file: str = setting(
        text("the path of a TOML file"), "", "TOML file of API keys: name, sha256, weight, max_priority"
    )
    open_routes: list[str] = setting(
        listing(choice("metrics", "pool")), [], "routes that need no key although keys are set: metrics, pool"
    )
    cors_origins: list[str] = setting(listing(text("an origin or *")), [], "origins whose pages may call the API")
    # Pieces a stream may be behind its client: about a screen of text, some KB of memory.
    stream_buffer: int = setting(integer(1, 2**20), 64, "pieces a stream holds for a slow client")
    # Enough for a packet round the world, small enough that a stalled client's backlog is bounded in memory.
    keep_alive_comment: float = setting(
        seconds(0.05, 3600), 10.0, "seconds of silence after which a stream sends a comment"
    )
    # A connection that takes no byte for this long has no reader any more.
    stall_timeout: float = setting(
        seconds(0.5, 3600), 20.0, "seconds without progress after which a connection is closed"
    )
    # OpenAI's clients hold connections for reuse; most proxies drop idle ones after 60 to 75 s.
    keep_alive: int = setting(integer(1, 3600), 75, "seconds an idle connection is kept")
    # Tokenizing is native code that releases the interpreter; more threads than cores only switch.
    prompt_threads: int = setting(
        integer(1, 64), min(4, os.cpu_count() or 1), "threads that render and tokenize prompts"
    )
    runtime: str = setting(text("a short folder path"), "", "folder for sockets, locks and logs (default: of the user)")

    def model_named(self, name: str) -> ModelChoice | None:
        """The served model of this public id."""
        return next((model for model in self.model if model.name == name), None)

    @property
    def keys_file(self) -> Path | None:
        """The keys file, if one is set."""
        return Path(self.api_keys_file) if self.api_keys_file else None
