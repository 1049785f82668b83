"""`parallel-train data build` and `parallel-train data show`: making a corpus and looking into one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

import numpy as np
from parallel_config import path_argument

from parallel_trainer.data.build import build_corpus
from parallel_trainer.data.documents import TextFile, input_files, python_stdlib_files
from parallel_trainer.data.gpt_dataset import SCAN_BLOCK
from parallel_trainer.data.indexed import IndexedCorpus, corpus_files
from parallel_trainer.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from parallel_trainer.errors import UserError

SHOWN_TOKENS = 64


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `data` with its two sub-commands."""
    parser = subparsers.add_parser("data", help="build a corpus of tokens, look into one")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_build(commands.add_parser("build", help="text to PREFIX.bin and PREFIX.idx"))
    _add_show(commands.add_parser("show", help="what a corpus holds"))


def run(args: argparse.Namespace) -> int:
    """Run the sub-command that was parsed. Raises UserError for what the user can mend."""
    return int(args.run_data(args))


def _add_build(parser: argparse.ArgumentParser) -> None:
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument(
        "--input",
        nargs="+",
        type=path_argument,
        metavar="PATH",
        help="text files (one document each), .jsonl files (one document a line), folders of such files",
    )
    text.add_argument(
        "--python-stdlib",
        action="store_true",
        help="the sources of this Python's standard library, without its tests, one document per file",
    )
    parser.add_argument(
        "--output", type=path_argument, required=True, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx"
    )
    parser.add_argument(
        "--tokenizer",
        type=_byte_or_path,
        default="byte",
        metavar="byte|FILE",
        help="byte (default), or a tokenizer.json",
    )
    parser.add_argument("--eod-token", metavar="TOKEN", help="the token of the tokenizer.json that ends a document")
    parser.add_argument("--jsonl-key", default="text", metavar="KEY", help="where a .jsonl line has its text")
    parser.add_argument("--extension", nargs="+", default=[], metavar=".EXT", help="take only such files of folders")
    parser.set_defaults(run=run, run_data=_build)


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prefix", type=path_argument, metavar="PREFIX", help="the corpus, without .bin or .idx")
    parser.add_argument("--document", type=int, metavar="N", help="print document N (from 0) whole")
    parser.add_argument(
        "--tokenizer",
        type=_byte_or_path,
        metavar="byte|FILE",
        help="to decode with; default: byte, where all ids fit it, else ids are printed",
    )
    parser.add_argument("--eod-token", metavar="TOKEN", help="as for build")
    parser.set_defaults(run=run, run_data=_show)


def _byte_or_path(text: str) -> str:
    return str(path_argument(text))


def _build(args: argparse.Namespace) -> int:
    tokenizer = load_tokenizer(args.tokenizer, eod_token=args.eod_token)
    files = python_stdlib_files() if args.python_stdlib else input_files(args.input, extensions=args.extension)
    built = build_corpus(_with_progress(files), args.output, tokenizer=tokenizer, jsonl_key=args.jsonl_key)
    bin_path, idx_path = corpus_files(args.output)
    print(
        f"wrote {bin_path} and {idx_path}: {built.documents:,} documents, {built.tokens:,} tokens "
        f"({built.dtype}), end of document {tokenizer.eod}, vocabulary {tokenizer.vocab_size:,}"
    )
    if built.empty:
        print(f"documents without text, left out: {built.empty:,}")
    if built.undecodable:
        print(f"files that are not UTF-8, left out: {built.undecodable:,}")
    return 0


def _with_progress(files: tuple[TextFile, ...]) -> Iterable[TextFile]:
    if not sys.stderr.isatty():
        return files
    from tqdm import tqdm

    return tqdm(files, desc="reading", unit="file", leave=False)


def _show(args: argparse.Namespace) -> int:
    corpus = IndexedCorpus.open(args.prefix)
    largest = _largest_id(corpus)
    tokenizer = _decoder(args, largest)
    if args.document is None:
        _print_table(_statistics(corpus, largest) | _opening(corpus, tokenizer))
        return 0
    documents = len(corpus.documents) - 1
    if not 0 <= args.document < documents:
        held = f"0 … {documents - 1}" if documents else "none"
        raise UserError(f"corpus {args.prefix} has no document {args.document}: it has {held}")
    print(_text(corpus.document(args.document), tokenizer))
    return 0


def _statistics(corpus: IndexedCorpus, largest: int) -> dict[str, str]:
    tokens = np.diff(corpus.starts[corpus.documents])
    rows = {
        "documents": f"{len(tokens):,}",
        "sequences": f"{len(corpus):,}",
        "tokens": f"{len(corpus.tokens):,}",
        "dtype": corpus.dtype.name,
    }
    if len(corpus.tokens):
        rows["largest token id"] = f"{largest:,}, so model.vocab_size must be at least {largest + 1:,}"
        last = np.unique(corpus.tokens[corpus.starts[corpus.documents[1:]][tokens > 0] - 1])
        if len(last) == 1 and len(tokens) > 1:
            rows["end of document"] = f"{last[0]}, the last token of every document"
        rows["shortest document"] = f"{tokens.min():,} tokens"
        rows["median document"] = f"{np.median(tokens):,.0f} tokens"
        rows["longest document"] = f"{tokens.max():,} tokens (document {np.argmax(tokens)})"
    return rows


def _opening(corpus: IndexedCorpus, tokenizer: Tokenizer | None) -> dict[str, str]:
    if len(corpus.documents) < 2:
        return {}
    return {"document 0 starts": repr(_text(corpus.document(0)[:SHOWN_TOKENS], tokenizer))}


def _print_table(rows: dict[str, str]) -> None:
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")


def _decoder(args: argparse.Namespace, largest: int) -> Tokenizer | None:
    if args.tokenizer is not None:
        return load_tokenizer(args.tokenizer, eod_token=args.eod_token)
    byte = ByteTokenizer()
    return byte if largest < byte.vocab_size else None


def _largest_id(corpus: IndexedCorpus) -> int:
    """The largest token id, read in blocks so that memory stays small; -1 of an empty corpus."""
    blocks = range(0, len(corpus.tokens), SCAN_BLOCK)
    return max((int(corpus.tokens[first : first + SCAN_BLOCK].max()) for first in blocks), default=-1)


def _text(ids: np.ndarray, tokenizer: Tokenizer | None) -> str:
    return " ".join(map(str, ids.tolist())) if tokenizer is None else tokenizer.decode(ids)
