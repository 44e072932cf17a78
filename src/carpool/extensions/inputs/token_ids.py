"""Makes token ids of a fixed list of texts, with the tokenizer.json that lies beside the model's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from carpool.config.rules import read_bytes, shown
from carpool.errors import ConfigError, Unsupported
from carpool.extensions.inputs.settings import FilledInput
from carpool.types import Array

_LARGEST_TOKENIZER = 64 << 20
_LARGEST_TEXTS = 4 << 20
_MOST_TEXTS = 1 << 15
_MOST_LENGTH = 512  # beyond, model_max_length is no length but a way to write that there is none
_NAMES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def token_ids(constant: FilledInput, places: list[Path], length: int, where: str) -> tuple[Array, Array]:
    """Returns token ids [texts, length] and their mask. `length` is what the model's file fixes, or -1."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise Unsupported(f"{where}: texts need tokenizers: pip install 'carpool[texts]'") from None
    found, config, special = (_file(places, name) for name in _NAMES)
    if found is None:
        raise ConfigError(f"{where}: there is no tokenizer.json in {' or '.join(map(str, places))}")
    try:
        tokenizer = Tokenizer.from_str(found)
    except Exception as error:  # the library's errors have no class of their own
        raise ConfigError(f"{where}: tokenizer.json cannot be read: {str(error)[:200]}") from None
    said = {**_json(special), **_json(config)}
    texts = [constant.template.format(text) for text in texts_of(constant, places, where)]
    most = length if length > 0 else constant.length or _declared_length(said)
    tokenizer.no_padding()
    if most:
        tokenizer.enable_truncation(most)
    rows = [one.ids for one in tokenizer.encode_batch(texts)]
    width = most or max(map(len, rows))
    pad = _pad(tokenizer, said)
    ids = np.full((len(rows), width), pad, np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
        mask[number, : len(row)] = 1
    return ids, mask


def texts_of(constant: FilledInput, places: list[Path], where: str) -> tuple[str, ...]:
    if not constant.file:
        return constant.texts
    text = _file(places, constant.file, _LARGEST_TEXTS)
    lines = tuple(line for line in (text or "").splitlines() if line.strip())
    if not lines or len(lines) > _MOST_TEXTS:
        raise ConfigError(f"{where}: texts: {shown(constant.file)} is no file with a text in each line")
    return lines


def _file(places: list[Path], name: str, largest: int = _LARGEST_TOKENIZER) -> str | None:
    file = next((place / name for place in places if (place / name).is_file()), None)
    if file is None:
        return None
    return read_bytes(file, largest, f"larger than {largest} bytes").decode("utf-8", "replace")


def _json(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _declared_length(said: dict[str, Any]) -> int:
    length = said.get("model_max_length")
    return length if isinstance(length, int) and 0 < length <= _MOST_LENGTH else 0


def _pad(tokenizer: Any, said: dict[str, Any]) -> int:
    """Returns the token that fills a row up; 0 where the tokenizer has none."""
    token = said.get("pad_token")
    content = token.get("content") if isinstance(token, dict) else token
    number = tokenizer.token_to_id(content) if isinstance(content, str) else None
    return 0 if number is None else int(number)
