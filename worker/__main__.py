"""`python -m worker`: one worker for one model. Started by the pool, which reads its stdout: "progress TEXT" and "ready".

Exit status 0 after SIGTERM or SIGUSR1, 2 when model or settings cannot work (one line says why), 1 otherwise. MLX is imported here and
only in this process, on the main thread, which loads and steps.
"""

import gc
import logging
import os
import signal
import sys

from common import logs, runtime, settings
from common.envelope import WorkerFacts
from common.errors import ConfigError
from common.models import ModelChoice, check_folder, fingerprint
from common.processes import end_with_parent
from worker import engines
from worker.engine import Engine
from worker.link import Link, Vitals
from worker.loop import WorkerLoop
from worker.settings import WorkerSettings

# A broker that lives answers a HELLO within milliseconds; one that is being restarted, within its restart.
JOIN_S = 5.0


def main() -> int:
    """Load, serve, leave."""
    end_with_parent()
    # The terminal's Ctrl-C is the top process's affair; we are told by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        chosen = settings.load(WorkerSettings, os.environ)
        (model,) = chosen.model
        name = chosen.worker_name or f"{model.name}-{os.getpid()}"
        place = runtime.runtime(chosen.port, chosen.runtime)
        runtime.create(place)
        logs.start(name, chosen.log_level, chosen.log_format, place.logs)
        check_folder(model)
        engine = engines.make(chosen, model)
        engine.load(_tell)
        # What was made until now stays: no collection in the middle of a step need look at it again.
        gc.collect()
        gc.freeze()
        facts = _facts(engine, model, fingerprint(model.folder))
    except ConfigError as error:
        print(f"millpond worker: {error}", file=sys.stderr)
        return 2
    vitals = Vitals(memory=engine.memory())
    link = Link(place.back, name, facts, vitals)
    loop = WorkerLoop(engine, link, vitals, name, memory_budget=chosen.memory_share)
    signal.signal(signal.SIGTERM, lambda *_: loop.leave(chosen.shutdown_timeout))
    # The pool replaces this worker while clients are served: it may take as long as its requests do.
    signal.signal(signal.SIGUSR1, lambda *_: loop.drain())
    link.start()
    logs.event("ready", logging.INFO, slots=facts.slots, kv_tokens=facts.kv_tokens, blas=facts.blas)
    # The pool lets an older worker go for this one: not before it can be given work, unless there is no broker to join.
    link.joined.wait(JOIN_S)
    print("ready", flush=True)
    loop.run()
    link.close()
    engine.close()
    return 0


def _tell(words: str) -> None:
    logs.event(words)
    print(f"progress {words}", flush=True)


def _facts(engine: Engine, model: ModelChoice, print_: str) -> WorkerFacts:
    facts = engine.facts
    return WorkerFacts(
        model=model.name,
        fingerprint=print_,
        slots=facts.slots,
        kv_tokens=facts.kv_tokens,
        block=facts.block,
        context=facts.context,
        lanes=list(facts.lanes),
        abilities=list(facts.abilities),
        blas=facts.details.get("blas", ""),
        folder=str(model.folder),
        weight_bytes=facts.weight_bytes,
        kv_bytes_per_token=facts.kv_bytes_per_token,
    )


if __name__ == "__main__":
    sys.exit(main())
