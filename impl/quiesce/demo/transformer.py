"""A tiny transformer, cut into pipeline stages and tensor-parallel shards, with the same bits however it is run.

A shard holds half of the heads, of the MLP and of the vocabulary. Its partial sums are added up by `Reduce`: over
`torch.distributed` in the engine, from the other shard beside it in a run in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

SHARDS = 2
STAGES = 2


@dataclass(frozen=True)
class Config:
    """Sizes of the model, in elements; the weights follow from the seed."""

    width: int = 256
    heads: int = 4
    layers: int = 4
    vocabulary: int = 2048
    chunk: int = 1024
    seed: int = 11


class Layer:
    """Attention and MLP of one layer, as far as one shard has them."""

    def __init__(self, config: Config, number: int, shard: int) -> None:
        make = torch.Generator().manual_seed(config.seed * 1_000 + number)

        def weight(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
            return torch.randn(rows, columns, generator=make) * (gain / math.sqrt(rows))

        width, part = config.width, config.width // SHARDS
        mine = slice(shard * part, (shard + 1) * part)
        # The gain makes attention choosy, so that a token depends on every chunk of its prompt.
        self.query = weight(width, width, 2.0)[:, mine].contiguous()
        self.key = weight(width, width, 2.0)[:, mine].contiguous()
        self.value = weight(width, width)[:, mine].contiguous()
        self.out = weight(width, width)[mine].contiguous()
        self.up = weight(width, 2 * width)[:, 2 * shard * part : 2 * (shard + 1) * part].contiguous()
        self.down = weight(2 * width, width)[2 * shard * part : 2 * (shard + 1) * part].contiguous()
        self.heads = config.heads // SHARDS

    def attend(self, x: torch.Tensor, start: int, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """This shard's part of the attention of tokens `start`... over all tokens up to them; (tokens, width)."""
        tokens, end = len(x), start + len(x)
        query, key, value = (
            (x @ w).view(tokens, self.heads, -1).transpose(0, 1) for w in (self.query, self.key, self.value)
        )
        keys, values = cache
        keys[:, start:end], values[:, start:end] = key, value
        scores = query @ keys[:, :end].transpose(1, 2) / math.sqrt(query.shape[-1])
        scores[:, :, start:].masked_fill_(torch.ones(tokens, tokens).triu(1).bool(), -math.inf)
        mixed = torch.softmax(scores, -1) @ values[:, :end]
        return mixed.transpose(0, 1).reshape(tokens, -1) @ self.out

    def think(self, x: torch.Tensor) -> torch.Tensor:
        """This shard's part of the MLP; (tokens, width)."""
        return torch.relu(x @ self.up).square_() @ self.down


Caches = dict[int, list[tuple[torch.Tensor, torch.Tensor]]]
Reduce = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""The sum, or for logits the row, of what the shards of this process computed and what the others did."""


class Stage:
    """The layers of one pipeline stage, for some of its shards: one in the engine, all in a run in one process.

    `hidden`, of shape (chunk, width), is written again by every forward, as the outputs of a captured graph are.
    """

    def __init__(self, config: Config, number: int, shards: Sequence[int]) -> None:
        per_stage = config.layers // STAGES
        self.config, self.number = config, number
        self.layers = [
            [Layer(config, number * per_stage + i, shard) for shard in shards] for i in range(per_stage)
        ]
        self.hidden = torch.zeros(config.chunk, config.width)
        make = torch.Generator().manual_seed(config.seed)
        self.embedding = torch.randn(config.vocabulary, config.width, generator=make)
        head = torch.randn(config.width, config.vocabulary, generator=make) / math.sqrt(config.width)
        part = config.vocabulary // SHARDS
        self.heads = [head[:, shard * part : (shard + 1) * part].contiguous() for shard in shards]
        self._caches: Caches = {}

    def forward(
        self, request: int, start: int, length: int, entering: torch.Tensor, add: Reduce
    ) -> torch.Tensor:
        """Tokens `start`... of a request of at most `length` tokens: a view of `hidden`, which the next call writes."""
        hidden = self.hidden[: len(entering)]
        # The input is read twice, before and behind the first attention: a lease has to last that long.
        stream = entering
        caches = self._cache(request, length)
        for i, shards in enumerate(self.layers):
            x = norm(stream)
            parts = [shard.attend(x, start, caches[i * len(shards) + s]) for s, shard in enumerate(shards)]
            torch.add(stream, add(parts), out=hidden)
            stream = hidden
            x = norm(stream)
            hidden.add_(add([shard.think(x) for shard in shards]))
        return hidden

    def log_probabilities(self, hidden: torch.Tensor, join: Reduce) -> torch.Tensor:
        """Of every entry of the vocabulary behind each token; (tokens, vocabulary)."""
        x = norm(hidden)
        return torch.log_softmax(join([x @ head for head in self.heads]), -1)

    def forget(self, request: int) -> None:
        """Drop what attention remembers of a request."""
        self._caches.pop(request, None)

    def _cache(self, request: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if request not in self._caches:
            each = (self.config.heads // SHARDS, length, self.config.width // self.config.heads)
            count = sum(map(len, self.layers))
            self._caches[request] = [(torch.zeros(each), torch.zeros(each)) for _ in range(count)]
        return self._caches[request]


def norm(x: torch.Tensor) -> torch.Tensor:
    """Root-mean-square normalisation."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


@dataclass
class Output:
    """What a request got: its tokens, and the log-probabilities behind each token of the prompt and the answer."""

    tokens: list[int]
    log_probabilities: list[torch.Tensor]


def prompt(config: Config, request: int, tokens: int) -> torch.Tensor:
    """The prompt embeddings of a request; (tokens, width)."""
    make = torch.Generator().manual_seed(config.seed * 7 + request)
    return torch.randn(tokens, config.width, generator=make)


def alone(config: Config, embeddings: torch.Tensor, answer: int) -> Output:
    """The answer of `answer` tokens, computed in this process: both stages, both shards, the same chunks."""
    stages = [Stage(config, number, range(SHARDS)) for number in range(STAGES)]

    def add(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return parts[0] + parts[1]

    def step(start: int, hidden: torch.Tensor) -> torch.Tensor:
        for stage in stages:
            hidden = stage.forward(0, start, len(embeddings) + answer, hidden, add)
        return stages[-1].log_probabilities(hidden, lambda parts: torch.cat(list(parts), -1))

    output = Output([], [])
    with torch.inference_mode():
        for start in range(0, len(embeddings), config.chunk):
            output.log_probabilities.append(step(start, embeddings[start : start + config.chunk]))
        while True:
            token = int(output.log_probabilities[-1][-1].argmax())
            output.tokens.append(token)
            if len(output.tokens) == answer:
                return output
            start = len(embeddings) + len(output.tokens) - 1
            output.log_probabilities.append(step(start, stages[0].embedding[token : token + 1]))
