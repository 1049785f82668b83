"""The command `mask-compression show`: a mask drawn in the terminal, as JSON or as a picture."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mask_compression import picture
from mask_compression.building import from_lengths
from mask_compression.describe import as_dict, as_text, draw
from mask_compression.mask import CompressedMask
from mask_compression.terminal import show_anywhere
from mask_compression.tokens import from_tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, or 2 when the arguments are wrong."""
    if argv is None and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly where the output goes to a closed pipe
    show_anywhere()
    arguments = _parser().parse_args(argv)
    try:
        drawing = draw(_mask(arguments), row=arguments.row, cp=arguments.cp, order=arguments.order, tile=arguments.tile)
        files = [path for path in (arguments.png, arguments.svg) if path is not None]
        if files:
            picture.save(drawing, *files)
    except (TypeError, ValueError, OSError) as error:
        print(f"mask-compression: {error}", file=sys.stderr)
        return 2
    print(json.dumps(as_dict(drawing)) if arguments.json else as_text(drawing))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mask-compression", description="Attention masks of packed documents.")
    show = parser.add_subparsers(required=True, metavar="COMMAND").add_parser("show", help="draw a mask")
    source = show.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--tokens", type=_expanded, metavar="TOKENS", help="token ids as 5,6,0,7, or a .npy file of (S,) or (B, S)"
    )
    source.add_argument("--lengths", metavar="LENGTHS", help="document lengths as 5,7,4; rows of a batch as 3,5/8")
    show.add_argument("--eod", type=int, metavar="ID", help="with --tokens: the token that ends a document")
    show.add_argument("--cp", type=int, default=1, metavar="N", help="context-parallel ranks (default 1)")
    show.add_argument("--order", choices=("contiguous", "zigzag"), default="contiguous", help="how they cut a row")
    show.add_argument("--tile", type=int, metavar="N", help="tokens of a tile (default: at most 64 tiles across)")
    show.add_argument("--row", type=int, default=0, metavar="B", help="which row of a batch (default 0)")
    show.add_argument("--json", action="store_true", help="print JSON instead of the drawing")
    show.add_argument("--png", type=_named(".png"), metavar="FILE.png", help="also write a picture")
    show.add_argument("--svg", type=_named(".svg"), metavar="FILE.svg", help="also write a picture")
    return parser


def _mask(arguments: argparse.Namespace) -> CompressedMask:
    if arguments.lengths is not None:
        if arguments.eod is not None:
            raise ValueError("--eod goes with --tokens: lengths already say where documents end")
        rows = [_numbers(row, "--lengths") for row in arguments.lengths.split("/")]
        try:
            return from_lengths(rows if len(rows) > 1 else rows[0])
        except ValueError as error:
            raise ValueError(f"--lengths {arguments.lengths!r}: {str(error).removeprefix('from_lengths: ')}") from None
    if arguments.eod is None:
        raise ValueError("--tokens needs --eod, the token that ends a document")
    return from_tokens(_tokens(arguments.tokens), arguments.eod)


def _tokens(text: str) -> npt.NDArray[np.int64]:
    if not text.endswith(".npy"):
        return _numbers(text, "--tokens")
    try:
        return np.load(text, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except (ValueError, EOFError) as error:
        raise ValueError(f"{text} is no .npy file of integers: {error}") from None


def _numbers(text: str, option: str) -> npt.NDArray[np.int64]:
    try:
        return np.array([int(number) for number in text.split(",")], np.int64)
    except (ValueError, OverflowError):
        raise ValueError(f"{option} {text!r} must be whole numbers with commas between them, like 5,7,4") from None


def _expanded(text: str) -> str:
    """The text with a home folder in place of a leading `~` or `~user`, as a shell would."""
    try:
        return str(Path(text).expanduser()) if text.startswith("~") else text
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} has no home folder for {text.partition('/')[0]}") from None


def _named(suffix: str) -> Callable[[str], Path]:
    def path(text: str) -> Path:
        if not text.endswith(suffix):
            raise argparse.ArgumentTypeError(f"{text!r} must end with {suffix}")
        return Path(_expanded(text))

    return path
