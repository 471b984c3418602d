"""Looking values up in a configuration file as its own library would read it.

Released files leave out values that equal the library's defaults; `FAMILY_DEFAULTS` holds those,
from the configuration classes of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from oomwatch.errors import UsageError

FAMILY_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "gemma2": {
        "tie_word_embeddings": True,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "max_position_embeddings": 8192,
    },
    "gemma": {"tie_word_embeddings": True, "head_dim": 256, "max_position_embeddings": 8192},
    "gemma4_text": {"tie_word_embeddings": True},
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    "llama4_text": {"attention_chunk_size": 8192},
    "qwen2": {"vocab_size": 151936, "max_position_embeddings": 32768},
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True},
}
"""Values that released files omit because they are the class defaults of transformers."""

_NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config")


_LARGEST: Final = 2**40  # beyond any size of a model; keeps hostile files from costing time


class Reader:
    """Looks a key up in the text part, then outside it, then in the family's defaults."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.outer = raw
        self.inner: Mapping[str, Any] = raw
        while True:
            nested = next(
                (self.inner[k] for k in _NESTED if isinstance(self.inner.get(k), Mapping)), None
            )
            if nested is None:
                break
            self.inner = nested
        self.model_type = str(self.inner.get("model_type") or raw.get("model_type") or "")
        self.defaults = FAMILY_DEFAULTS.get(self.model_type, {})
        self.unknown: list[str] = []

    def get(self, *names: str, default: Any = None) -> Any:
        """The first value that is there, by any of these names."""
        for source in (self.inner, self.outer, self.defaults):
            for name in names:
                if source.get(name) is not None:
                    return source[name]
        return default

    def size(self, *names: str, default: int | None = None) -> int:
        """A positive integer; a list (per-layer widths) counts by its largest entry.

        Raises UsageError when there is none and nothing stands in for it.
        """
        value = self.get(*names)
        if isinstance(value, list):
            value = max((x for x in value if _is_number(x)), default=None)
        if not _is_number(value) or not 0 < value <= _LARGEST:
            if default is None:
                raise UsageError(
                    f"the model config has no usable {names[0]}; give a config.json of a text model"
                )
            if value is not None:
                self.unknown.append(f"{names[0]} ({default} taken)")
            return default
        return max(1, int(value))

    def number(self, *names: str, default: int = 0) -> int:
        """As `size`, where 0 is a value too."""
        value = self.get(*names)
        if isinstance(value, list):
            value = max((x for x in value if _is_number(x)), default=None)
        return int(value) if _is_number(value) and 0 <= value <= _LARGEST else default

    def items(self, *names: str) -> list[Any]:
        """A list, or an empty one."""
        value = self.get(*names)
        return value if isinstance(value, list) else []

    def flag(self, name: str, default: bool = False) -> bool:
        """A switch."""
        return bool(self.get(name, default=default))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
