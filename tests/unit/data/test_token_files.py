"""Token files of other programs: the ids that they hold, in blocks, and what is wrong with them in one line."""

import struct

import numpy as np
import pytest

from harness.data.blocks import token_blocks
from harness.data.files.sources import TOKENS, find_tokens, source_groups
from harness.data.files.token_files import open_tokens, token_paths
from harness.data.formats.megatron_format import HEADER
from harness.errors import UserError

DOCUMENTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16]]
IDS = list(range(5, 17))
CODES = {np.uint8: 1, np.int16: 3, np.int32: 4, np.int64: 5, np.uint16: 8, np.float32: 7}


def megatron(prefix, dtype=np.uint16, documents=DOCUMENTS, version=1, magic=b"MMIDIDX\0\0", code=None):
    """As Megatron's IndexedDatasetBuilder writes it: a sequence a document, their first sequences and the end."""
    prefix.with_suffix(".bin").write_bytes(np.concatenate(documents).astype(dtype).tobytes())
    lengths = np.array([len(document) for document in documents], dtype=np.int32)
    pointers = (np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize).astype(np.int64)
    head = struct.pack("<QBQQ", version, code or CODES[dtype], len(documents), len(documents) + 1)
    ends = np.arange(len(documents) + 1, dtype=np.int64)
    prefix.with_suffix(".idx").write_bytes(magic + head + lengths.tobytes() + pointers.tobytes() + ends.tobytes())
    return str(prefix)


LENGTHS = HEADER.size
POINTERS, ENDS = LENGTHS + 4 * 3, LENGTHS + 12 * 3
"""Where they begin in the index of DOCUMENTS."""


def changed(prefix, at, form, value):
    """Megatron's pair with another number at a byte of its index."""
    megatron(prefix)
    index = prefix.with_suffix(".idx")
    content = bytearray(index.read_bytes())
    struct.pack_into(form, content, at, value)
    index.write_bytes(content)


def datatrove(path, size=2, metadata=True, index=True):
    """As datatrove's TokenizedFile writes it."""
    path.write_bytes(np.array(IDS, dtype=np.uint16 if size == 2 else np.uint32).tobytes())
    if index:
        ends = np.cumsum([len(document) for document in DOCUMENTS]).astype(np.uint64)
        path.with_name(path.name + ".index").write_bytes(ends.tobytes())
    if metadata:
        path.with_name(path.name + ".metadata").write_text(f"gpt2|{size}\n{len(IDS)}\n12 T")
    return str(path)


def blocks(source, packing=False, vocabulary=100):
    (group,) = source_groups([source])
    assert group.kind == TOKENS
    found = token_blocks(find_tokens(source), 4, vocabulary, packing=packing)
    return [{name: values.tolist() for name, values in block.items()} for block in found]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64, np.uint16])
def test_megatrons_pair_is_read_by_its_prefix_or_either_file(dtype, tmp_path):
    prefix = megatron(tmp_path / "corpus_text_document", dtype)
    wanted = [{"input_ids": IDS[start : start + 4]} for start in range(0, 12, 4)]
    assert blocks(prefix) == blocks(f"{prefix}.bin") == blocks(f"{prefix}.idx") == blocks(str(tmp_path)) == wanted
    assert blocks(f"{tmp_path}/*.bin") == wanted
    positions = [block["position_ids"] for block in blocks(prefix, packing=True)]
    assert positions == [[0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize(("size", "metadata", "vocabulary"), [(2, True, 10**6), (4, True, 100), (4, False, 100)])
def test_datatroves_file_is_read_by_its_metadata_or_its_index(size, metadata, vocabulary, tmp_path):
    path = datatrove(tmp_path / "000_0.ds", size, metadata)
    assert [block["input_ids"] for block in blocks(path, True, vocabulary)] == [IDS[i : i + 4] for i in (0, 4, 8)]
    assert blocks(path, True, vocabulary)[1]["position_ids"] == [0, 0, 1, 2]


def test_hidden_files_and_those_that_describe_the_tokens_do_not_count(tmp_path):
    wanted = blocks(megatron(tmp_path / "a"))
    (tmp_path / "info.json").write_text("{}")
    (tmp_path / ".notes.txt").write_text("hidden")
    (tmp_path / ".cache").mkdir()
    megatron(tmp_path / ".cache" / "a")
    assert blocks(str(tmp_path)) == blocks(f"{tmp_path}/*") == blocks(f"{tmp_path}/**") == wanted
    (tmp_path / "readme.txt").write_text("text")
    assert source_groups([str(tmp_path)])[0].kind == "text"


def test_files_of_a_folder_are_in_the_order_of_their_paths_and_links_are_followed(tmp_path):
    for name in ("b", "a/z", "a/b/c"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        megatron(tmp_path / "data" / name)
    (tmp_path / "linked").symlink_to(tmp_path / "data")
    for folder in ("data", "linked"):
        found = [file.relative_to(tmp_path / folder).with_suffix("") for file in find_tokens(f"{tmp_path}/{folder}")]
        assert list(map(str, found)) == ["a/b/c", "a/z", "b"]
    assert len(find_tokens(f"{tmp_path}/*")) == 6 and len(find_tokens(f"{tmp_path}/data/*")) == 3


def test_several_files_are_one_and_may_have_weights(tmp_path):
    first, second = megatron(tmp_path / "a"), datatrove(tmp_path / "b.ds")
    (group,) = source_groups([first, second])
    assert len(token_blocks([find_tokens(path)[0] for path in group.paths], 8, 100, packing=False)) == 3
    assert [group.weight for group in source_groups([f"{first}:0.7", f"{second}:0.3"])] == [0.7, 0.3]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: megatron(p, version=2), r"a\.idx has version 2: only version 1 is known"),
        (lambda p: megatron(p, code=9), r"a\.idx has the dtype code 9, which is not an integer type"),
        (lambda p: megatron(p, np.float32), r"a\.idx has the dtype code 7, which is not an integer type"),
        (lambda p: megatron(p, magic=b"TNTIDX\0\0\0"), r"a\.idx is not a Megatron index"),
        (lambda p: megatron(p) and p.with_suffix(".idx").unlink(), r"a\.bin has no a\.idx beside it"),
        (lambda p: megatron(p) and p.with_suffix(".bin").unlink(), r"cannot read .*a\.bin: No such file"),
        (
            lambda p: megatron(p) and p.with_suffix(".bin").write_bytes(b"1234"),
            r"a\.bin has 2 tokens, but",
        ),
        (
            lambda p: megatron(p) and p.with_suffix(".bin").write_bytes(b"123"),
            r"a\.bin has 3 bytes, no multiple",
        ),
        (
            lambda p: megatron(p) and p.with_suffix(".idx").write_bytes(HEADER.pack(b"MMIDIDX\0\0", 1, 8, 0, 0)),
            r"a\.bin has 12 tokens, but a\.idx says otherwise",
        ),
        (
            lambda p: megatron(p) and p.with_suffix(".idx").write_bytes(HEADER.pack(b"MMIDIDX\0\0", 1, 8, 2**60, 1)),
            r"a\.idx is cut off: it is not of the size of 1,152,921,504,606,846,976 sequences and 1 documents",
        ),
        (lambda p: megatron(p) and p.with_suffix(".idx").write_bytes(b"MMIDIDX"), r"a\.idx is not a Megatron index"),
        (lambda p: changed(p, LENGTHS + 4, "<i", 2), r"a\.idx is damaged: sequence 2 does not begin where the one"),
        (lambda p: changed(p, LENGTHS, "<i", -4), r"a\.idx is damaged: sequence 0 does not begin where"),
        (lambda p: changed(p, POINTERS, "<q", 2), r"a\.idx is damaged: sequence 0 does not begin where"),
        (lambda p: changed(p, POINTERS + 8, "<q", 2**40), r"a\.idx is damaged: sequence 1 does not begin where"),
        (lambda p: changed(p, POINTERS + 8, "<q", -2), r"a\.idx is damaged: sequence 1 does not begin where"),
        (lambda p: changed(p, ENDS, "<q", -1), r"a\.idx is damaged: its documents do not begin at sequences 0 to 3"),
        (lambda p: changed(p, ENDS + 8, "<q", 3), r"a\.idx is damaged: its documents do not begin"),
        (lambda p: changed(p, ENDS + 24, "<q", 4), r"a\.idx is damaged: its documents do not begin"),
        (lambda p: changed(p, ENDS + 24, "<q", 2), r"a\.idx is damaged: its documents do not begin"),
        (lambda p: changed(p, ENDS, "<q", 1), r"a\.idx is damaged: its documents do not begin"),
        (
            lambda p: changed(p, HEADER.size - 8, "<Q", 3),
            r"a\.idx is damaged: it is not of the size of 3 sequences and 3 ",
        ),
    ],
)
def test_a_wrong_file_is_refused_in_the_first_second(make, words, tmp_path):
    make(tmp_path / "a")
    with pytest.raises(UserError, match=words):
        source_groups([f"{tmp_path}/a.bin"])


def test_documents_of_datatrove_that_go_back_are_refused(tmp_path):
    datatrove(tmp_path / "a.ds")
    (tmp_path / "a.ds.index").write_bytes(np.array([9, 4, 12], dtype=np.uint64).tobytes())
    with pytest.raises(UserError, match=r"a\.ds\.index is damaged: its documents do not end one after the other"):
        source_groups([f"{tmp_path}/a.ds"])


def test_a_file_of_another_vocabulary_or_without_documents_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"a\.bin has the id 16 near token 0, but the model's ids are 0 to 9"):
        blocks(megatron(tmp_path / "a"), vocabulary=10)
    with pytest.raises(UserError, match=r"b\.ds does not say where its documents begin: remove --packing"):
        blocks(datatrove(tmp_path / "b.ds", index=False), packing=True)
    (tmp_path / "c.ds").write_bytes(b"")
    with pytest.raises(UserError, match=r"c\.ds is empty"):
        source_groups([f"{tmp_path}/c.ds"])


@pytest.mark.parametrize(
    ("metadata", "size"),
    [
        pytest.param(b"gpt2|2\n12", 2, id="two-bytes"),
        pytest.param(b"a|b|4 \n12", 4, id="a-bar-in-the-name"),
        pytest.param(b"gpt2\n12", 4, id="no-size-but-an-index"),
        pytest.param(b"gpt2|3\n12", 4, id="a-size-that-there-is-not"),
        pytest.param(b"caf\xe9|4\n12", 4, id="latin-1"),
        pytest.param(b"", 4, id="empty"),
    ],
)
def test_metadata_of_datatrove_say_the_size_of_a_token_where_they_can(metadata, size, tmp_path):
    datatrove(tmp_path / "a.ds", size)
    (tmp_path / "a.ds.metadata").write_bytes(metadata)
    assert open_tokens(tmp_path / "a.ds", 100).ids.tolist() == IDS
    with pytest.raises(UserError, match=r"a\.ds has \d+ tokens of \d bytes, a\.ds\.index says 12"):
        (tmp_path / "a.ds.metadata").write_bytes(b"gpt2|%d" % (6 - size))
        open_tokens(tmp_path / "a.ds", 100)


@pytest.mark.parametrize(("vocabulary", "size"), [(2**16, 2), (2**16 + 1, 4), (17, 2)])
def test_without_any_word_of_it_the_size_of_a_token_follows_from_the_vocabulary(vocabulary, size, tmp_path):
    datatrove(tmp_path / "a.ds", size, metadata=False, index=False)
    file = open_tokens(tmp_path / "a.ds", vocabulary)
    assert file.ids.tolist() == IDS and file.starts.tolist() == []


@pytest.mark.parametrize(
    ("position", "token", "words"),
    [(0, 100, "the id 100 near token 0,"), (999_999, 200, "the id 200 near token"), (3, -1, "the id -1 near token 0,")],
)
def test_an_id_that_the_model_has_not_is_found_at_either_end_of_a_long_file(position, token, words, tmp_path):
    ids = np.arange(1_000_000) % 100
    ids[position] = token
    megatron(tmp_path / "a", np.int32, [ids])
    with pytest.raises(UserError, match=f"{words}.*the model's ids are 0 to 99: use the model whose tokenizer"):
        open_tokens(tmp_path / "a.bin", 100)


def test_paths_of_token_files_are_known_by_their_ends(tmp_path):
    megatron(tmp_path / "a.v1.prefix")
    (tmp_path / "b").mkdir()
    megatron(tmp_path / "b")
    name = f"{tmp_path}/a.v1"
    assert token_paths(name) == token_paths(f"{name}.bin") == token_paths(f"{name}.idx")
    assert token_paths(f"{tmp_path}/gone.ds") and not token_paths(f"{tmp_path}/gone")
    assert not token_paths(tmp_path / "b")  # a folder, though b.bin stands beside it
