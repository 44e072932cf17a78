"""Our own reader of printed lines: a picture 32 pixels high goes in, characters come out one after the other.

It is the network alone, as it is trained; torch_decoder.py writes with it in slots.
"""

from __future__ import annotations

import torch
from torch import nn

HEIGHT = 32  # pixels of a line
SHRINK = 8  # columns of pixels for one column of what the encoder makes of them
COLUMNS = 64  # of those at most: lines up to 512 pixels wide
LONGEST = 80  # characters, the end included
WIDTH, HEADS, LAYERS, INNER = 192, 6, 4, 512
ALPHABET = "".join(map(chr, range(32, 127))) + "€£"
END = 0  # of the text, and what comes before its first character; characters are counted from 1


class LineReader(nn.Module):
    """Implements a network of 3.9 million parameters: a convolutional stem, and four layers each of encoder
    and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *_convolution(1, 32, 2),
            *_convolution(32, 64, 1),
            *_convolution(64, 96, 2),
            *_convolution(96, 96, 1),
            *_convolution(96, 128, 2),
            *_convolution(128, 128, 1),
        )
        self.columns = nn.Linear(128 * HEIGHT // SHRINK, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(COLUMNS, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(
            layer, LAYERS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        self.characters = nn.Embedding(len(ALPHABET) + 1, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LONGEST, WIDTH))
        written = nn.TransformerDecoderLayer(WIDTH, HEADS, INNER, 0.0, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoder(written, LAYERS, norm=nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, len(ALPHABET) + 1)
        nn.init.normal_(self.characters.weight, std=0.02)
        for module in (self.encoder, self.decoder):
            for parameter in module.parameters():
                if parameter.dim() > 1:
                    nn.init.xavier_uniform_(parameter)

    def encode(self, pictures: torch.Tensor) -> torch.Tensor:
        """Encodes [lines, 1, 32, pixels], grey from 0 to 1, to [lines, pixels / 8, 192]."""
        found = self.stem((pictures - 0.5) * 4.0)
        rows = self.columns(found.flatten(1, 2).transpose(1, 2))
        encoded: torch.Tensor = self.encoder(rows + self.places[: rows.shape[1]])
        return encoded

    def forward(self, pictures: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Returns what each character should be, from those `before` it [lines, characters], for all at
        once."""
        return self.write(self.encode(pictures), before)

    def write(self, encoded: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        count = before.shape[1]
        rows = self.characters(before) + self.positions[:count]
        mask = torch.ones(count, count, dtype=torch.bool, device=before.device).triu(1)
        found: torch.Tensor = self.head(self.decoder(rows, encoded, tgt_mask=mask, tgt_is_causal=True))
        return found


def _convolution(channels: int, made: int, stride: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, made, 3, stride, 1, bias=False), nn.BatchNorm2d(made), nn.ReLU(inplace=True)


def text_of(tokens: list[int]) -> str:
    """Returns the text up to its end, or all of it."""
    written = tokens[: tokens.index(END)] if END in tokens else tokens
    return "".join(ALPHABET[token - 1] for token in written)
