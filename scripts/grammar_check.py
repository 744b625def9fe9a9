"""`python -m scripts.grammar_check [schemas|reference] [how many]`: what takes too long for the tests, with the demo
model.

schemas: three replies at temperature 1 for each of forty JSON schemas; every one that ended with stop must validate.
reference: greedy replies to twenty prompts in one batch must be mlx-lm's own stream_generate's. Prints one line a case;
exit status 1 if one is wrong. Must never import mlx by name: it belongs to the worker.
"""

import importlib
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from common.generation import GenerationRequest, Sampling
from common.ids import RequestId
from scripts.demo_model import fetch
from scripts.grammar_check_schemas import SCHEMAS
from worker import device
from worker.engine import Committed, Prefilled
from worker.engines.batched import BatchedEngine

REPLIES = 3
MOST_TOKENS = 400
TOPICS = (
    "the sea, a red house, Paris, how rain forms, two cats, the number seven, bread, a long walk, winter, "
    "music, an old clock, the moon, green tea, a train to the north, rivers, glass, why leaves fall, "
    "chess, salt, a letter"
).split(", ")


def main() -> int:
    """Run one of the two; schemas by default."""
    what = sys.argv[1] if len(sys.argv) > 1 else "schemas"
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 1 << 30
    home = Path(os.environ.get("MILLPOND_HOME") or "~/.cache/millpond").expanduser()
    _as_a_worker(home)
    folder = fetch(home)
    engine = BatchedEngine(folder, slots=16, cpu_weights="float32", memory_share=6 << 30)
    engine.load(lambda words: print(words, flush=True))
    return {"schemas": _schemas, "reference": _reference}[what](engine, folder, count)


def _as_a_worker(home: Path) -> None:
    """Start this process again with the libraries that a worker gets."""
    added = device.cpu_environment(max(1, (os.cpu_count() or 2) - 1), home)
    if any(os.environ.get(name) != value for name, value in added.items()) and "GRAMMAR_CHECK" not in os.environ:
        os.execve(
            sys.executable,
            [sys.executable, "-m", "scripts.grammar_check", *sys.argv[1:]],
            {**os.environ, **added, "GRAMMAR_CHECK": "again"},
        )


def _run(engine: BatchedEngine, requests: list[GenerationRequest]) -> Iterator[tuple[int, list[int], str, str]]:
    """(index, tokens, text, reason) of each, as they end."""
    replies: dict[RequestId, tuple[int, list[int], list[str]]] = {}
    for number, request in enumerate(requests):
        id = RequestId(number.to_bytes(16, "big"))
        replies[id] = number, [], []
        engine.start(id, request)
    while engine.busy:
        for step in engine.step():
            if isinstance(step, Prefilled):
                continue
            number, tokens, texts = replies[step.request]
            texts.append(step.text)
            if isinstance(step, Committed):
                tokens.append(step.token)
            else:
                yield number, tokens, "".join(texts), step.reason


def _prompt(engine: BatchedEngine, words: str) -> list[int]:
    text = f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n"
    return engine._texts.tokenizer.encode(text, add_special_tokens=False).ids


def _schemas(engine: BatchedEngine, folder: Path, count: int) -> int:
    jsonschema = importlib.import_module("jsonschema")
    checker = jsonschema.FormatChecker()
    requests, wanted = [], []
    for number, schema in enumerate(SCHEMAS[:count]):
        for reply in range(REPLIES):
            prompt = _prompt(engine, f"Answer about {TOPICS[number % len(TOPICS)]} in JSON: {json.dumps(schema)}")
            sampling = Sampling(temperature=1.0, seed=number * REPLIES + reply)
            requests.append(GenerationRequest(prompt, MOST_TOKENS, sampling, grammar=json.dumps(schema)))
            wanted.append(schema)
    wrong = unfinished = 0
    for number, _, text, reason in _run(engine, requests):
        schema = wanted[number]
        unfinished += reason == "length"
        problem = "" if reason in ("stop", "length") else f"ended with {reason}"
        if reason == "stop":
            try:
                value = json.loads(text)
                jsonschema.validate(value, schema, format_checker=checker)
            except (ValueError, jsonschema.ValidationError) as error:
                problem = str(error).splitlines()[0]
        wrong += bool(problem)
        print(f"{'WRONG' if problem else 'ok':6}{reason:7}{text[:90]!r} {problem}", flush=True)
    print(f"{len(requests)} replies to {len(set(map(str, wanted)))} schemas: {wrong} wrong, {unfinished} cut by length")
    return 1 if wrong else 0


def _reference(engine: BatchedEngine, folder: Path, count: int) -> int:
    generate, utils = importlib.import_module("mlx_lm.generate"), importlib.import_module("mlx_lm.utils")
    tokenizer = utils.load_tokenizer(folder)
    chooser = random.Random(0)
    prompts = [_prompt(engine, f"Say something about {topic}.") for topic in TOPICS[:count]]
    requests = [GenerationRequest(prompt, chooser.randrange(20, 40), Sampling(temperature=0.0)) for prompt in prompts]
    wrong = 0
    for number, tokens, text, reason in list(_run(engine, requests)):
        request = requests[number]
        reference = [
            step.token
            for step in generate.stream_generate(
                engine._model, tokenizer, request.prompt, max_tokens=request.max_tokens
            )
            if step.token not in engine._stop_ids
        ]
        same = tokens == reference[: len(tokens)] and len(tokens) == len(reference)
        wrong += not same
        print(f"{'ok' if same else 'WRONG':6}{reason:7}{len(tokens):3} tokens {text[:80]!r}", flush=True)
    print(f"{len(requests)} greedy replies: {wrong} differ from stream_generate's")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
