"""Text to token ids and back: raw bytes, or a Hugging Face `tokenizer.json`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from attrs import frozen

from parallel_trainer.errors import UserError

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
    "<|eot_id|>",
    "</s>",
    "<eos>",
    "[EOS]",
)
"""Names under which published tokenizers keep the token that ends a document."""


class Tokenizer(Protocol):
    """What building a corpus needs of a tokenizer.

    `eod` is the id that ends a document; ids are 0 … vocab_size - 1.
    """

    @property
    def eod(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text` as an integer array (tokens,), without beginning or end tokens."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids`; pieces that are not text on their own become U+FFFD."""
        ...


@frozen
class ByteTokenizer:
    """Ids 0 … 255 are the bytes of UTF-8, 256 ends a document."""

    eod: int = 256
    vocab_size: int = 257

    def encode(self, text: str) -> np.ndarray:
        """UTF-8 bytes of `text`, uint8 (bytes,). ValueError for lone surrogates, which UTF-8 cannot hold."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids: np.ndarray) -> str:
        """Text of the bytes in `ids`; the end of a document shows as `<EOD>`."""
        ids = np.asarray(ids)
        _check_ids(ids, self.vocab_size)
        documents = np.split(ids, np.flatnonzero(ids == self.eod) + 1)
        return "".join(
            part[part != self.eod].astype(np.uint8).tobytes().decode("utf-8", errors="replace")
            + "<EOD>" * int(np.count_nonzero(part == self.eod))
            for part in documents
        )


@frozen(eq=False)
class HuggingFaceTokenizer:
    """A tokenizer read from the `tokenizer.json` of a published model. Made by `load_tokenizer`."""

    backend: tokenizers.Tokenizer
    eod: int
    vocab_size: int

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, int32 (tokens,)."""
        return np.asarray(self.backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """Text of `ids`, special tokens included."""
        _check_ids(np.asarray(ids), self.vocab_size)
        return str(self.backend.decode(np.asarray(ids).tolist(), skip_special_tokens=False))


def load_tokenizer(name: str, *, eod_token: str | None = None) -> Tokenizer:
    """The tokenizer called `byte`, or the one in the `tokenizer.json` at the path `name`.

    `eod_token` names the token that ends a document; without it the file must hold exactly one of
    END_OF_DOCUMENT_NAMES. Raises UserError for a file that cannot be used.
    """
    if name == "byte":
        if eod_token is not None:
            raise UserError(
                f"--eod-token {eod_token!r} does not go with the byte tokenizer, whose end of a document is "
                "always 256: leave it out, or give the path of a tokenizer.json"
            )
        return ByteTokenizer()
    path = Path(name)
    if path.is_dir():
        raise UserError(f"tokenizer {name} is a folder: give the tokenizer.json inside it")
    if not path.is_file():
        raise UserError(f"tokenizer {name} does not exist: give `byte` or the path of a tokenizer.json")
    return _read_tokenizer_json(path, eod_token)


def _read_tokenizer_json(path: Path, eod_token: str | None) -> HuggingFaceTokenizer:
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise UserError(
            f"tokenizer {path} cannot be read: {error}. It must be a tokenizer.json of the Hugging Face "
            "tokenizers library (tokenizer.model and vocab.txt are other formats)"
        ) from error
    # A file saved by a fine-tuning script may cut every text at 512 tokens or fill it up to a fixed length.
    backend.no_truncation()
    backend.no_padding()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise UserError(f"tokenizer {path} has an empty vocabulary: give one that was trained")
    name = _end_of_document(path, vocabulary, eod_token)
    return HuggingFaceTokenizer(backend=backend, eod=vocabulary[name], vocab_size=max(vocabulary.values()) + 1)


def _end_of_document(path: Path, vocabulary: dict[str, int], eod_token: str | None) -> str:
    candidates = [name for name in END_OF_DOCUMENT_NAMES if name in vocabulary]
    listed = ", ".join(f"{name} ({vocabulary[name]})" for name in candidates) or "none of the usual names"
    if eod_token is not None:
        if eod_token not in vocabulary:
            raise UserError(
                f"--eod-token {eod_token!r} is not among the {len(vocabulary)} tokens of {path}: it has {listed}"
            )
        return eod_token
    if len(candidates) != 1:
        raise UserError(
            f"{path} does not say which token ends a document: exactly one of the usual names must be in it, "
            f"and it has {listed}. Choose one with --eod-token"
        )
    return candidates[0]


def _check_ids(ids: np.ndarray, vocab_size: int) -> None:
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if bad.size:
        raise UserError(
            f"token id {int(bad[0])} is not in the tokenizer's vocabulary: ids are 0 … {vocab_size - 1}. "
            "Give the tokenizer that the corpus was built with"
        )
