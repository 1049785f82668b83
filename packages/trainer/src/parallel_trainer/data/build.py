"""Building a corpus: documents through a tokenizer into a pair of files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from attrs import frozen

from parallel_trainer.data.documents import TextFile, read_documents
from parallel_trainer.data.indexed import IndexedWriter
from parallel_trainer.data.tokenizer import Tokenizer
from parallel_trainer.errors import UserError


@frozen
class Built:
    """What was written, and what was left out: documents without text, files that are not UTF-8."""

    documents: int
    tokens: int
    dtype: str
    empty: int
    undecodable: int


def build_corpus(
    files: Iterable[TextFile], prefix: str | Path, *, tokenizer: Tokenizer, jsonl_key: str = "text"
) -> Built:
    """Write the documents of `files`, each followed by the end-of-document token, as a pair of files.

    One document at a time is in memory. Raises UserError, with nothing written, for a file that cannot be
    read and when there is no text at all.
    """
    documents = tokens = empty = undecodable = 0
    with IndexedWriter(prefix, vocab_size=tokenizer.vocab_size) as writer:
        for file in files:
            found = 0
            for text in read_documents(file, jsonl_key=jsonl_key):
                found += 1
                ids = tokenizer.encode(text) if text.strip() else np.empty(0, np.int32)
                if not ids.size:
                    empty += 1
                    continue
                writer.add_document(np.append(ids.astype(np.int32, copy=False), np.int32(tokenizer.eod)))
                documents += 1
                tokens += len(ids) + 1
            undecodable += file.skip_undecodable and not found
        if not documents:
            raise UserError(
                f"no text: the input holds {empty} empty documents and no other. Nothing was written; give "
                "files with text in them"
            )
    return Built(documents, tokens, writer.dtype.name, empty, undecodable)
