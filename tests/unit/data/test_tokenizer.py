"""The bytes tokenizer, its saved form read by transformers, and the choice between tokenizers."""

import json
import logging
import shutil
from functools import partial
from logging.handlers import BufferingHandler

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from harness.config.model.files import has_tokenizer
from harness.data.tokenizer import (
    ByteTokenizer,
    check_vocabulary,
    encode,
    load_tokenizer,
)
from harness.errors import UserError
from tests.unit.data.conftest import TEXTS

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(text=TEXT)
def test_bytes_come_back_exactly(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id]) == text


def test_broken_text_is_shown_and_not_raised():
    assert ByteTokenizer().decode([0x61, 0xE9, 0x62, 300]) == "a\ufffdb"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    ByteTokenizer().save_pretrained(directory)
    return directory


def test_a_saved_bytes_tokenizer_is_found_again(saved):
    assert isinstance(load_tokenizer(str(saved)), ByteTokenizer)
    assert isinstance(load_tokenizer(None, model_dir=saved), ByteTokenizer)


def test_a_saved_bytes_tokenizer_with_added_tokens_is_no_longer_one(theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    assert isinstance(load_tokenizer(str(tmp_path)), ByteTokenizer)
    grown = AutoTokenizer.from_pretrained(tmp_path)
    grown.add_tokens(["<|user|>"])
    grown.save_pretrained(tmp_path)
    ids = encode(load_tokenizer(str(tmp_path)), ["<|user|>a"])[0]
    assert ids.tolist() == [258, 97]


@pytest.fixture(scope="module")
def theirs(saved):
    return AutoTokenizer.from_pretrained(saved, local_files_only=True)


@given(text=TEXT)
def test_transformers_reads_the_saved_form_as_the_same_bytes(theirs, text):
    ids = theirs.encode(text)
    assert ids == list(text.encode("utf-8"))
    assert theirs.decode([*ids, 256], skip_special_tokens=True) == text
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (256, 257, 258)


def test_the_model_directory_decides_where_no_name_is_given(trained_tokenizer, tmp_path):
    assert len(load_tokenizer(None, model_dir=trained_tokenizer)) == 300
    assert isinstance(load_tokenizer("bytes", model_dir=trained_tokenizer), ByteTokenizer)
    assert isinstance(load_tokenizer(None, model_dir=tmp_path), ByteTokenizer)
    assert isinstance(load_tokenizer(), ByteTokenizer)
    assert has_tokenizer(trained_tokenizer) and not has_tokenizer(tmp_path)


def test_trained_weights_without_a_tokenizer_are_refused_unless_one_is_named(trained_tokenizer, tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"trained weights but no tokenizer \(tokenizer.json, .*--tokenizer_name"):
        load_tokenizer(None, model_dir=tmp_path)
    assert isinstance(load_tokenizer("bytes", model_dir=tmp_path), ByteTokenizer)
    assert len(load_tokenizer(str(trained_tokenizer), model_dir=tmp_path)) == 300


@pytest.mark.parametrize("family", ["gpt2", "gemma", "mt5"])
def test_a_tokenizer_of_special_tokens_alone_is_refused(family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="has a tokenizer without a vocabulary"):
        load_tokenizer(None, model_dir=tmp_path)


def test_texts_get_no_special_tokens(trained_tokenizer):
    tokenizer = load_tokenizer(str(trained_tokenizer))
    for ids, text in zip(encode(tokenizer, TEXTS), TEXTS, strict=True):
        assert not {tokenizer.bos_token_id, tokenizer.eos_token_id} & set(ids.tolist())
        assert tokenizer.decode(ids) == text


def test_a_long_document_is_no_warning(trained_tokenizer, request):
    tokenizer = load_tokenizer(str(trained_tokenizer))
    tokenizer.model_max_length = 8
    told, logger = BufferingHandler(capacity=10), logging.getLogger("transformers")
    logger.addHandler(told)
    request.addfinalizer(partial(logger.removeHandler, told))
    request.addfinalizer(partial(logger.setLevel, logger.level))  # a run may have asked for errors alone
    logger.setLevel(logging.WARNING)
    assert len(encode(tokenizer, ["the lazy dog " * 20])[0]) > 8
    assert not told.buffer
    tokenizer("the lazy dog " * 20)
    assert len(told.buffer) == 1


def test_what_cannot_be_read_is_one_line(trained_tokenizer, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(trained_tokenizer, broken)
    (broken / "tokenizer.json").write_text("{")
    deep = tmp_path / "deep"
    shutil.copytree(trained_tokenizer, deep)
    (deep / "tokenizer_config.json").write_text('{"a": ' * 10**5 + "1" + "}" * 10**5)
    for name, words in [
        (deep, "cannot read the tokenizer in"),
        (tmp_path / "none", "is not a directory"),
        (tmp_path, "contains no tokenizer"),
        (broken, "cannot read the tokenizer in"),
    ]:
        with pytest.raises(UserError, match=words) as caught:
            load_tokenizer(str(name))
        assert "\n" not in str(caught.value)


def test_a_tokenizer_that_cannot_close_a_document_is_refused(trained_tokenizer, tmp_path):
    endless = tmp_path / "endless"
    shutil.copytree(trained_tokenizer, endless)
    config = json.loads((endless / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (endless / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="endless has no end-of-sequence token"):
        load_tokenizer(str(endless))


def test_ids_must_fit_the_embedding(trained_tokenizer):
    check_vocabulary(ByteTokenizer(), 257)
    check_vocabulary(load_tokenizer(str(trained_tokenizer)), 300)
    with pytest.raises(UserError, match=r"go up to 256, the model's vocabulary has 256 ids.*at least 257"):
        check_vocabulary(ByteTokenizer(), 256)
    with pytest.raises(UserError, match="go up to 299"):
        check_vocabulary(load_tokenizer(str(trained_tokenizer)), 299)
