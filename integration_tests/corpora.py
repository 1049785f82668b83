"""Random text: for the plans of `cases` by the kind of their samples, and for the files in docs/scenarios."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from cases import EOD, PAD, SEQ_LENGTH, VOCAB_SIZE
from parallel_trainer.data.indexed import IndexedWriter


def write_corpora(folder: Path) -> dict[str, str]:
    """By text the prefix of its corpus of random tokens, written into `folder`; documents end with EOD.

    That of the scenarios is output/python-stdlib, as their files name it: ranks have to be started in `folder`.
    """
    generator = np.random.default_rng(0)

    def write(name: str, lengths: list[int], padded_to: int = 1) -> str:
        with IndexedWriter(folder / name, vocab_size=VOCAB_SIZE) as writer:
            for length in lengths:
                tokens = np.append(generator.integers(2, VOCAB_SIZE, length), EOD)
                padding = -len(tokens) % padded_to
                writer.add_document(np.append(tokens, np.full(padding, PAD, tokens.dtype)))
        return str(folder / name)

    # Samples with very different numbers of EODs; documents many times as long as a sample; documents of which each
    # fills three samples or less with tokens and the rest with padding.
    mixed = [
        int(generator.integers(1, 60) if generator.random() < 0.5 else generator.integers(1, 4)) for _ in range(300)
    ]
    long = [int(length) for length in generator.integers(20, 30, 4) * SEQ_LENGTH]
    short = [int(length) for length in generator.integers(5, 2 * SEQ_LENGTH, 120)]
    plain = write("mixed", mixed)
    _scenarios_corpus(folder / "output" / "python-stdlib", generator)
    return {
        "plain": plain,
        "packed": plain,
        "long": write("long", long),
        "padded": write("padded", short, padded_to=3 * SEQ_LENGTH),
    }


def _scenarios_corpus(prefix: Path, generator: np.random.Generator) -> None:
    """Bytes, and 256 at the end of a document."""
    prefix.parent.mkdir()
    with IndexedWriter(prefix, vocab_size=257) as writer:
        for length in generator.integers(10, 400, 200):
            writer.add_document(np.append(generator.integers(0, 256, length), 256))
