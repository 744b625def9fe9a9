"""Which models an instance serves, and the fingerprint of how their prompts are made.

MILLPOND_MODEL reaches the child processes as name=FOLDER entries that exist; `serve` has resolved defaults, hub ids and
downloads before. The fingerprint covers what turns messages into token ids and bounds them, so that ids rendered for one
tokenizer are never given to a model with another.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from common.settings import Parser

# All that the API reads of a model, so that what it knows of one is a matter of the fingerprint alone.
FINGERPRINT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json", "added_tokens.json",
    "special_tokens_map.json", "config.json", "generation_config.json",
)  # fmt: skip
MORE_TEMPLATES = "additional_chat_templates"

# Values of config.json's model_type whose replies are denoised block by block; they have engine and abilities of their own.
BLOCK_DIFFUSION = frozenset({"diffusion_gemma"})


@dataclass(frozen=True)
class ModelChoice:
    """One served model: its public id and where it comes from (a folder, or a hub id before `serve` resolved it)."""

    name: str
    source: str

    @property
    def folder(self) -> Path:
        """The source as a folder."""
        return Path(self.source)

    def __str__(self) -> str:
        return f"{self.name}={self.source}"


def parse_model(text: str) -> ModelChoice:
    """PATH, hub id, or name=either. Raises ValueError for empty parts."""
    name, equals, source = text.partition("=")
    if not equals:
        name, source = "", text
    source = source.strip()
    name = name.strip() or (Path(source).name if Path(source).expanduser().is_dir() else source)
    if not source or not name or len(name) > 256 or not name.isprintable():
        raise ValueError
    return ModelChoice(name, source)


MODEL = Parser(parse_model, "a model folder, a Hugging Face id, or name=either")


def check_folder(model: ModelChoice) -> None:
    """Raises ConfigError unless the folder looks like a model: config.json, tokenizer.json, weights."""
    folder = model.folder
    if not folder.is_dir():
        raise ConfigError(f"model {model.name!r}: there is no folder {folder}; give a model folder or a Hugging Face id")
    for needed in ("config.json", "tokenizer.json"):
        if not (folder / needed).is_file():
            raise ConfigError(f"model {model.name!r}: {folder} has no {needed}, so it is not an MLX model folder")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model {model.name!r}: {folder} has no *.safetensors weights, so it is not an MLX model folder")


def denoises(folder: Path) -> bool:
    """Whether the model in `folder` is one of BLOCK_DIFFUSION. False for a folder whose config.json says nothing."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        # Whoever loads the model says what is wrong with it.
        return False
    return isinstance(config, dict) and config.get("model_type") in BLOCK_DIFFUSION


def fingerprint(folder: Path) -> str:
    """16 hex digits over the files that make prompts. Raises OSError."""
    digest = hashlib.sha256()
    templates = sorted(path.name for path in (folder / MORE_TEMPLATES).glob("*.jinja"))
    for name in (*FINGERPRINT_FILES, *(f"{MORE_TEMPLATES}/{template}" for template in templates)):
        path = folder / name
        if path.is_file():
            digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
