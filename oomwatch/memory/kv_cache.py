"""The KV cache as the engine builds it: pages per layer, groups that share a pool, blocks, tokens.

Page and group rules were read from vLLM's planning code (0.8 to 0.33) and agree with the block
counts of public logs; where a release changed a rule the version is beside it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final, Literal

from oomwatch.memory.data.kv_formats import KvFormat
from oomwatch.memory.kv_formats import find_format, head_bytes, latent_bytes
from oomwatch.memory.model_config import (
    Attention,
    LatentAttention,
    Layer,
    Mixer,
    ModelConfig,
    Recurrent,
)
from oomwatch.memory.settings import Settings
from oomwatch.memory.weights import stages

Kind = Literal["full", "sliding", "chunked", "state", "cross"]

_STATE_ALIGNMENT: Final = 16  # tokens; hybrid models round their block size up to this
_STATE_ALIGNMENT_MLA: Final = 64  # with latent attention: a Kimi Linear start prints blocks of 960
_UNABSORBED_HEAD: Final = 256  # head size that MLA is padded to where it keeps keys and values
_UNQUANTIZED_ENDS: Final = 2  # layers at each end that turboquant leaves in 16 bits


@dataclasses.dataclass(frozen=True, slots=True)
class PageSpec:
    """What one layer asks of the pool: its page, and how many pages a request takes."""

    kind: Kind
    block_tokens: int
    page_bytes: int
    window_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Layers that share one block table."""

    spec: PageSpec
    layers: int


@dataclasses.dataclass(frozen=True, slots=True)
class KvLayout:
    """The pool of one rank: blocks of `block_bytes`, dealt to requests by the groups."""

    groups: tuple[Group, ...]
    block_bytes: int
    block_tokens: int
    """Tokens of the smallest block; the unit of the log's token line before 0.20.1."""
    bytes_per_token: int
    """Growth per token of a long request on this rank, padding included."""
    state_bytes: int
    """Constant bytes per running sequence (states), without padding."""
    in_flight_tokens: int
    context_parallel: int = 1
    states_per_request: int = 1
    product_line: bool = True
    """The log's token line is concurrency x length (from 0.20.1)."""
    notes: tuple[str, ...] = ()

    def request_blocks(self, length: int) -> int:
        """Blocks that one request of `length` tokens takes, over all groups."""
        return sum(self._group_blocks(g.spec, length) for g in self.groups)

    def _group_blocks(self, spec: PageSpec, length: int) -> int:
        if spec.kind == "state":
            return self.states_per_request
        if spec.kind == "sliding":
            kept = min(spec.window_tokens - 1 + self.in_flight_tokens, length)
            return math.ceil(kept / spec.block_tokens) + 1
        if spec.kind == "cross":
            return math.ceil(spec.window_tokens / spec.block_tokens)
        if spec.kind == "chunked":
            kept = min(spec.window_tokens + self.in_flight_tokens, length)
            return math.ceil(kept / spec.block_tokens)
        return math.ceil(math.ceil(length / self.context_parallel) / spec.block_tokens)

    def request_bytes(self, length: int) -> int:
        """Bytes of the pool that one request of `length` tokens takes on this rank."""
        return self.request_blocks(length) * self.block_bytes

    def blocks(self, available_bytes: float) -> int:
        """Blocks that fit; 0 for nothing or less."""
        return max(0, int(available_bytes // self.block_bytes)) if self.block_bytes else 0

    def concurrency(self, blocks: int, length: int) -> float:
        """Requests of `length` tokens that fit together."""
        needed = self.request_blocks(length)
        return blocks / needed if needed else math.inf

    def tokens(self, blocks: int, length: int) -> int:
        """Capacity for full-length requests: whole blocks of one table, else the product.

        0 for models that keep nothing in the pool.
        """
        if not self.groups:
            return 0
        if len(self.groups) == 1 and self.groups[0].spec.kind == "full" and not self.product_line:
            return blocks * self.groups[0].spec.block_tokens * self.context_parallel
        return int(self.concurrency(blocks, length) * length)

    def line_tokens(self, blocks: int, length: int) -> int:
        """What the server's own "KV cache size" line says."""
        if not self.groups:
            return 0
        if self.product_line:
            return int(self.concurrency(blocks, length) * length)
        return blocks // max(1, len(self.groups)) * self.block_tokens * self.context_parallel

    def longest(self, blocks: int, limit: int) -> int:
        """The longest request, up to `limit` tokens, that the pool holds alone; 0 for none."""
        if not self.groups:
            return limit
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.request_blocks(middle) <= blocks:
                low = middle
            else:
                high = middle - 1
        return low


def kv_heads_on_rank(heads: int, ranks: int) -> int:
    """KV heads of one rank; with more ranks than heads each head is copied."""
    return max(1, heads // ranks)


def build_layout(model: ModelConfig, settings: Settings, stage: int = 0) -> KvLayout:
    """The pool of a rank of pipeline stage `stage`."""
    notes: list[str] = []
    fmt = settings.kv_format(model)
    own = [
        _spec(model, layer, i, fmt=fmt, settings=settings, notes=notes)
        for i, layer in enumerate(model.layers)
    ]
    own += _draft_specs(model, fmt, settings)
    if model.encoder_tokens:
        own += _cross_specs(own, model.encoder_tokens)
    placed = [i for i, spec in enumerate(own) if spec is not None]
    alignment = _STATE_ALIGNMENT_MLA if model.is_latent else _STATE_ALIGNMENT
    kept = _with_state_pages([s for s in own if s is not None], alignment, notes)
    specs = _equal_pages(kept, notes)
    stage_of = _stages(len(model.layers), len(own), settings.pipeline_parallel)
    groups: list[Group] = []
    block_bytes, shared = 0, 0
    tables = _group(specs, settings, notes)
    for table in tables:
        here = [specs[n] for n in table if stage_of[placed[n]] == stage]
        if not here:
            continue
        groups.append(Group(here[0], len(here)))
        block_bytes = sum(s.page_bytes for s in here)  # one table: pages may differ
        shared = max(shared, len(here) * here[0].page_bytes)
    if len(tables) > 1:
        block_bytes = shared
    block_tokens = min((g.spec.block_tokens for g in groups if g.spec.kind != "state"), default=1)
    per_token = sum(block_bytes / g.spec.block_tokens for g in groups if g.spec.kind == "full")
    states = [x.mixer for i, x in enumerate(model.layers) if stage_of[i] == stage]
    return KvLayout(
        groups=tuple(groups),
        block_bytes=block_bytes,
        block_tokens=block_tokens,
        bytes_per_token=round(per_token / settings.context_parallel),
        state_bytes=sum(
            state_bytes(mixer, settings, model.dtype_bytes)
            for mixer in states
            if isinstance(mixer, Recurrent)
        ),
        in_flight_tokens=settings.in_flight_tokens,
        context_parallel=settings.context_parallel,
        states_per_request=(2 if settings.prefix_caching else 1) + settings.speculative_tokens,
        product_line=settings.version >= (0, 20, 1) and settings.engine == "vllm",
        notes=tuple(dict.fromkeys(notes)),
    )


def _stages(layers: int, with_draft: int, pipeline: int) -> list[int]:
    """The pipeline stage of every layer; draft layers live on the last one."""
    split = stages(layers, pipeline)
    found = [number for number, part in enumerate(split) for _ in part]
    return found + [pipeline - 1] * (with_draft - layers)


# ----------------------------------------------------------------------------- pages of a layer
def token_bytes(mixer: Mixer, fmt: KvFormat, settings: Settings, dtype_bytes: int) -> int:
    """Bytes of one token in one layer on one rank; 0 for layers without a cache of their own."""
    if isinstance(mixer, LatentAttention) and settings.latent_cache:
        return latent_bytes(fmt, mixer, dtype_bytes)
    if isinstance(mixer, LatentAttention):
        heads = kv_heads_on_rank(mixer.heads, settings.attention_ranks)
        return heads * head_bytes(fmt, _UNABSORBED_HEAD, dtype_bytes)
    if isinstance(mixer, Attention) and not mixer.shares_kv:
        heads = kv_heads_on_rank(mixer.kv_heads, settings.attention_ranks)
        return heads * head_bytes(fmt, mixer.head_dim, dtype_bytes)
    return 0


def state_bytes(mixer: Recurrent, settings: Settings, dtype_bytes: int) -> int:
    """Bytes of one sequence's state in one layer on one rank: convolution window and SSM state."""
    ranks = settings.attention_ranks
    window = mixer.conv_kernel - 1 + settings.speculative_tokens
    conv = -(-mixer.conv_dim // ranks) * window * dtype_bytes
    heads = -(-mixer.heads // ranks)
    width = settings.state_dtype_bytes or mixer.state_dtype_bytes
    return conv + heads * mixer.head_dim * mixer.state_dim * width


def _spec(
    model: ModelConfig,
    layer: Layer,
    index: int,
    *,
    fmt: KvFormat,
    settings: Settings,
    notes: list[str],
) -> PageSpec | None:
    mixer, block = layer.mixer, settings.block_size_for(model)
    if isinstance(mixer, Recurrent):
        if settings.engine == "sglang":
            return None  # states have a pool of their own there
        return PageSpec("state", 1, state_bytes(mixer, settings, model.dtype_bytes))
    if fmt.layout == "turboquant" and not model.is_hybrid:
        ends = _UNQUANTIZED_ENDS
        if index < ends or index >= len(model.layers) - ends:
            fmt = find_format("auto") or fmt
    size = token_bytes(mixer, fmt, settings, model.dtype_bytes) * block
    if size == 0:
        return None
    if isinstance(mixer, Attention) and settings.groups_layers:
        if mixer.window_tokens:
            return PageSpec("sliding", block, size, mixer.window_tokens)
        if mixer.chunk_tokens and settings.chunked_local_pages:
            return PageSpec("chunked", block, size, mixer.chunk_tokens)
        if mixer.chunk_tokens:
            notes.append(
                "chunked local layers are kept as full attention: "
                "the engine turns its hybrid cache off for them by default"
            )
    elif isinstance(mixer, Attention) and mixer.window_tokens and not settings.groups_layers:
        notes.append("sliding-window layers are allocated as full attention here")
    return PageSpec("full", block, size)


def _cross_specs(own: list[PageSpec | None], encoder_tokens: int) -> list[PageSpec | None]:
    """Cross attention beside every decoder layer: pages for the encoder's output."""
    return [
        dataclasses.replace(spec, kind="cross", window_tokens=encoder_tokens)
        for spec in own
        if spec is not None
    ]


def _draft_specs(model: ModelConfig, fmt: KvFormat, settings: Settings) -> list[PageSpec | None]:
    """Full-attention layers that multi-token prediction adds."""
    if not settings.draft_layers or not model.attention_layers:
        return []
    mixer = next(
        (
            x.mixer
            for x in model.attention_layers
            if not (isinstance(x.mixer, Attention) and x.mixer.window_tokens)
        ),
        model.attention_layers[-1].mixer,
    )
    block = settings.block_size_for(model)
    size = token_bytes(mixer, fmt, settings, model.dtype_bytes) * block
    return [PageSpec("full", block, size)] * settings.draft_layers


def _with_state_pages(specs: list[PageSpec], alignment: int, notes: list[str]) -> list[PageSpec]:
    """Attention with states: the block grows until its page holds a state; states are padded."""
    state = max((s.page_bytes for s in specs if s.kind == "state"), default=0)
    attention = next((s for s in specs if s.kind != "state"), None)
    if not state or attention is None:
        return specs
    per_token = attention.page_bytes // attention.block_tokens
    tokens = math.ceil(state / per_token / alignment) * alignment
    tokens = max(tokens, attention.block_tokens)
    notes.append(f"attention blocks hold {tokens} tokens, so that a page holds one layer's state")
    return [
        dataclasses.replace(
            spec,
            block_tokens=tokens,
            page_bytes=(per_token if spec.kind == "state" else spec.page_bytes // spec.block_tokens)
            * tokens,
        )
        for spec in specs
    ]


# --------------------------------------------------------------------------------------- groups
def _equal_pages(specs: list[PageSpec], notes: list[str]) -> list[PageSpec]:
    """Pages of one size where several kinds share a pool: smaller ones get longer blocks."""
    if len({(s.kind, s.block_tokens, s.window_tokens) for s in specs}) <= 1:
        return specs
    page = max(s.page_bytes for s in specs)
    equal: list[PageSpec] = []
    for spec in specs:
        ratio, rest = divmod(page, spec.page_bytes)
        if rest:
            notes.append("pages of different layers do not divide each other; padded")
            ratio = 1
        tokens = spec.block_tokens if spec.kind == "state" else spec.block_tokens * ratio
        equal.append(dataclasses.replace(spec, page_bytes=page, block_tokens=tokens))
    return equal


def _group(specs: list[PageSpec], settings: Settings, notes: list[str]) -> list[list[int]]:
    """Indices of the layers of each group (block table).

    One group when every layer needs the same number of slots. Else each kind is cut into groups of
    the size of the smallest kind; of the largest when that is near (from 0.12.0 within 1.25 times,
    from 0.20.0 within 1.5).
    """
    kinds: dict[tuple[str, int, int], list[int]] = {}
    for i, spec in enumerate(specs):
        kinds.setdefault((spec.kind, spec.block_tokens, spec.window_tokens), []).append(i)
    if len(kinds) <= 1:
        return list(kinds.values())
    counts = [len(x) for x in kinds.values()]
    near = 1.5 if settings.version >= (0, 20, 0) else 1.25
    size = min(counts)
    if settings.version >= (0, 12, 0) and max(counts) < size * near:
        size = max(counts)
    groups = []
    for layers in kinds.values():
        number = math.ceil(len(layers) / size)
        groups += [layers[i::number] for i in range(number)]
        if len(layers) % size:
            notes.append(f"{size - len(layers) % size} padding layers even the groups out")
    return groups
