"""What an operator can say about admission and time, each with its reason."""

from dataclasses import dataclass

from common.settings import auto_or, boolean, choice, integer, seconds, setting, text


@dataclass(frozen=True)
class BrokerSettings:
    """The broker's settings. Limits count requests per model; durations are seconds."""

    port: int = setting(integer(1, 65535), 8080, "port of the HTTP endpoint; also names the runtime folder")
    runtime: str = setting(text("a folder path"), "", "folder for sockets and logs (default: the system's private one)")
    max_inflight: int | str = setting(
        auto_or(integer(1, 1_000_000)), "auto", "requests that may run at once, per model (auto: the planned slots)"
    )
    # Two full batches of the default 16 slots: more waiting than that exceeds the queue timeout at usual reply lengths.
    max_queue: int = setting(integer(0, 1_000_000), 32, "requests that may wait, per model")
    # Under the 60 s at which common proxies give up on a silent upstream, so that the client gets our answer and not theirs.
    queue_timeout: float = setting(seconds(0.05, 86_400), 45.0, "longest wait for a slot")
    request_timeout: float = setting(seconds(0.1, 604_800), 600.0, "longest life of a request, waiting included")
    # Rendering and tokenizing 5 MB takes a few seconds; ten times that means that nobody will submit.
    reservation_timeout: float = setting(seconds(0.1, 3600), 30.0, "longest time between a place and its prompt", internal=True)
    prefix_routing: bool = setting(boolean(), True, "send a prompt to a worker that has read its head, if that is not too busy")
    # Five missed heartbeats.
    silence: float = setting(seconds(0.2, 3600), 5.0, "a peer unheard for this long is lost")
    # Longer than the slowest prefill chunk: 512 tokens of a large model on a slow machine take tens of seconds.
    stuck: float = setting(seconds(0.2, 86_400), 120.0, "an engine without a finished step for this long is killed")
    log_level: str = setting(choice("debug", "info", "warning", "error"), "info", "how much to log")
    log_format: str = setting(choice("text", "json"), "text", "log lines for people or for machines")
