"""Tokenizers: bytes against UTF-8 itself, tokenizer.json against a vocabulary written in the test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_trainer.data.tokenizer import ByteTokenizer, load_tokenizer
from parallel_trainer.errors import UserError
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing


def word_tokenizer(folder: Path, *special: str, truncate: bool = False) -> str:
    """Saves a tokenizer with ids [UNK] 0, one 1, two 2, three 3, then the special tokens."""
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "one": 1, "two": 2, "three": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    if truncate:
        tokenizer.enable_truncation(2)
        tokenizer.post_processor = TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], tokenizer.token_to_id(special[0]))]
        )
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def test_bytes_are_utf8_and_the_end_of_a_document_comes_after_them() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé").tolist() == [0x61, 0xC3, 0xA9]
    assert (tokenizer.eod, tokenizer.vocab_size) == (256, 257)


@settings(deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_bytes_come_back_as_the_text(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_documents_show_their_ends_and_cut_characters_show_as_replaced() -> None:
    assert ByteTokenizer().decode(np.array([0x61, 256, 256, 0xC3])) == "a<EOD><EOD>\ufffd"


def test_an_id_of_another_tokenizer_is_refused() -> None:
    with pytest.raises(UserError, match=r"token id 300 .* 0 … 256"):
        ByteTokenizer().decode(np.array([1, 300]))


def test_a_tokenizer_file_gives_its_ids_without_added_tokens_and_without_truncation(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(word_tokenizer(tmp_path, "</s>", truncate=True))
    assert tokenizer.encode("three one two four").tolist() == [3, 1, 2, 0]
    assert (tokenizer.eod, tokenizer.vocab_size) == (4, 5)
    assert tokenizer.decode(np.array([1, 2, 4])) == "one two </s>"


def test_of_two_possible_ends_one_must_be_named(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path, "<|endoftext|>", "<|im_end|>")
    with pytest.raises(UserError, match=r"<\|endoftext\|> \(4\), <\|im_end\|> \(5\).*--eod-token"):
        load_tokenizer(path)
    assert load_tokenizer(path, eod_token="<|im_end|>").eod == 5


def test_an_end_of_an_unusual_name_must_be_named(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path, "<stop>")
    with pytest.raises(UserError, match="none of the usual names"):
        load_tokenizer(path)
    assert load_tokenizer(path, eod_token="<stop>").eod == 4
    with pytest.raises(UserError, match=r"'<end>' is not among the 5 tokens"):
        load_tokenizer(path, eod_token="<end>")


@pytest.mark.parametrize("content", ["", "{}", "[1, 2]", "not json", '{"model": {"type": "BPE"}}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(str(path))


def test_missing_file_and_folder_and_byte_with_a_token_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_tokenizer(str(tmp_path / "no.json"))
    with pytest.raises(UserError, match="is a folder"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(UserError, match="always 256"):
        load_tokenizer("byte", eod_token="</s>")
