"""The models this process answers for: their prompts, context, sampling defaults and fingerprints.

Read once at start from the model folders (never the weights). Knows nothing of workers. Invariant: a model that is
listed can render a prompt.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api import abilities
from api.prompt import PromptSource
from common.generation import Sampling
from common.models import ModelChoice, check_folder, denoises, fingerprint

# For a config that does not say: what most small models have.
UNKNOWN_CONTEXT = 4096


@dataclass(frozen=True)
class ServedModel:
    """One model as clients see it. defaults: sampling that applies where a request says nothing. aliases: names that
    mean it where they mean no other. assumed: the abilities that count until a worker has named its own."""

    name: str
    fingerprint: str
    context: int
    created: int
    defaults: Sampling
    prompts: PromptSource
    aliases: frozenset[str] = frozenset()
    assumed: frozenset[str] = abilities.AUTOREGRESSIVE

    def prompt_limit(self, max_prompt: int) -> int:
        """The longest prompt that leaves room for one token."""
        return max(1, min(max_prompt, self.context - 1))


def read_model(choice: ModelChoice) -> ServedModel:
    """Raises ConfigError when the folder is no usable model."""
    check_folder(choice)
    folder = choice.folder
    return ServedModel(
        name=choice.name,
        fingerprint=fingerprint(folder),
        context=context_length(_read_json(folder / "config.json")),
        created=int((folder / "config.json").stat().st_mtime),
        defaults=sampling_defaults(_read_json(folder / "generation_config.json")),
        prompts=PromptSource(folder),
        # A hub id without its owner, and what the folder is called: what people type.
        aliases=frozenset({choice.name.rpartition("/")[2], folder.name} - {choice.name, ""}),
        assumed=abilities.BLOCK_DIFFUSION if denoises(folder) else abilities.AUTOREGRESSIVE,
    )


def find(models: Mapping[str, ServedModel], name: str) -> ServedModel | None:
    """The model of this id, or of this alias if only one has it."""
    found = models.get(name)
    if found is None:
        also = [model for model in models.values() if name in model.aliases]
        found = also[0] if len(also) == 1 else None
    return found


def context_length(config: dict[str, Any]) -> int:
    """Tokens of prompt and reply together, as the model's config says."""
    text = config.get("text_config")
    for source in (text if isinstance(text, dict) else {}, config):
        for name in ("max_position_embeddings", "max_sequence_length", "n_positions", "max_seq_len"):
            value = source.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return UNKNOWN_CONTEXT


def sampling_defaults(config: dict[str, Any]) -> Sampling:
    """What generation_config.json says of sampling; values no request could give either are left out."""
    number = {
        name: value for name, value in config.items() if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    temperature = number.get("temperature", 1.0) if config.get("do_sample") is not False else 0.0
    top_p, top_k = number.get("top_p", 1.0), number.get("top_k", 0)
    min_p, penalty = number.get("min_p", 0.0), number.get("repetition_penalty", 1.0)
    return Sampling(
        temperature=float(temperature) if 0 <= temperature <= 2 else 1.0,
        top_p=float(top_p) if 0 < top_p <= 1 else 1.0,
        top_k=int(top_k) if 0 < top_k < 2**31 else 0,
        min_p=float(min_p) if 0 <= min_p <= 1 else 0.0,
        repetition_penalty=float(penalty) if penalty > 0 else 1.0,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
