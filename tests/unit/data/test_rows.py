"""What a row is by its columns, what document it becomes, and what each wrong row is answered with."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from harness.data.rows.kinds import BESIDE, COLUMNS, ROLES, columns_of, document, kind_of_row
from harness.errors import UserError

ASK = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}
CALL = {"name": "add", "arguments": {"a": 2, "b": 2}}
CALLING = {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def made(row: dict[str, Any]) -> dict[str, Any]:
    """The conversation of a row."""
    found = document(row, kind_of_row(row, "a:1"), "a:1")
    assert found["place"] == "a:1"
    conversation: dict[str, Any] = json.loads(found["conversation"])
    return conversation


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        pytest.param(["text"], "text", id="text"),
        pytest.param(["id", "text", "prompt"], "text", id="a-prompt-alone-is-none"),
        pytest.param(["text", "messages"], "messages", id="messages-before-text"),
        pytest.param(["conversations", "messages"], "messages", id="messages-before-sharegpt"),
        pytest.param(["conversations", "prompt", "completion"], "sharegpt", id="sharegpt-before-completion"),
        pytest.param(["output", "instruction", "completion", "prompt"], "completion", id="completion-before-alpaca"),
        pytest.param(["output", "instruction", "text"], "alpaca", id="alpaca-before-text"),
    ],
)
def test_the_columns_decide_in_an_order(columns: list[str], kind: str) -> None:
    assert kind_of_row(columns, "a") == kind
    assert kind_of_row(reversed(columns), "a") == kind


@pytest.mark.parametrize(
    ("columns", "has"),
    [
        pytest.param([], r"\(it has: none\)", id="no-column"),
        pytest.param(["prompt", "output"], r"\(it has: prompt, output\)", id="halves-of-two-kinds"),
        pytest.param(["Text", " text"], r"\(it has: Text,  text\)", id="other-spelling"),
        pytest.param([3, None], r"\(it has: 3, None\)", id="no-names"),
    ],
)
def test_columns_that_make_no_row_are_listed(columns: list[str], has: str) -> None:
    with pytest.raises(UserError, match=f"^a:1 has no column `text`, `messages`.*{has}: rename one$"):
        kind_of_row(columns, "a:1")


def test_every_kind_is_named_by_its_columns_and_others_by_their_own_name() -> None:
    assert {kind: columns_of(kind) for kind in ("text", "completion", "tokens")} == {
        "text": "`text`",
        "completion": "`prompt` and `completion`",
        "tokens": "tokens",
    }
    assert COLUMNS.keys() == BESIDE.keys()
    assert all(kind_of_row([*COLUMNS[kind], *BESIDE[kind]], "a") == kind for kind in COLUMNS)


@pytest.mark.parametrize("text", ["", " ", "\0\x85\u2028", "🙂" * 3, "x" * 10**5])
def test_a_text_is_taken_as_it_is(text: str) -> None:
    assert document({"text": text, "messages": None}, "text", "a:1") == {"text": text}


@pytest.mark.parametrize(
    ("row", "conversation"),
    [
        pytest.param({"messages": [ASK, ANSWER]}, {"messages": [ASK, ANSWER], "answers_from": 0}, id="messages"),
        pytest.param(
            {"messages": ({**ASK, "name": None, "weight": 0}, ANSWER), "tools": None},
            {"messages": [ASK, ANSWER], "answers_from": 0},
            id="nulls-of-parquet-are-dropped",
        ),
        pytest.param(
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "2 +"}, {"type": "text", "text": " 2?"}]},
                    ANSWER,
                ]
            },
            {"messages": [ASK, ANSWER], "answers_from": 0},
            id="parts-of-text-are-joined",
        ),
        pytest.param(
            {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, ANSWER], "tools": TOOLS},
            {
                "messages": [ASK, CALLING, ANSWER],
                "answers_from": 0,
                "tools": TOOLS,
            },
            id="a-call-needs-no-content",
        ),
        pytest.param(
            {"prompt": "2 + 2?", "completion": " 4", "tools": []},
            {"prompt": "2 + 2?", "completion": " 4"},
            id="texts-and-no-tools",
        ),
        pytest.param({"prompt": "", "completion": "4"}, {"prompt": "", "completion": "4"}, id="an-empty-prompt-is-one"),
        pytest.param(
            {"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER]},
            {"messages": [ASK, ANSWER, ASK, ANSWER], "answers_from": 3},
            id="answers-of-a-prompt-are-not-learnt",
        ),
        pytest.param(
            {
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "human", "value": "a"},
                    {"from": "gpt", "value": "b"},
                ]
            },
            {
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                ],
                "answers_from": 0,
            },
            id="sharegpt",
        ),
        pytest.param(
            {
                "conversations": [
                    {"from": "human", "value": "a", "role": None},
                    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 2}}'},
                    {"from": "observation", "value": "4"},
                    {"from": "bot", "value": "b", "weight": 1},
                ]
            },
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    CALLING,
                    {"role": "tool", "content": "4"},
                    {"role": "assistant", "content": "b"},
                ],
                "answers_from": 0,
            },
            id="sharegpt-with-a-tool",
        ),
        pytest.param(
            {"instruction": "a", "input": "  ", "output": "b", "system": ""},
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answers_from": 0},
            id="alpaca-with-an-input-of-spaces",
        ),
        pytest.param(
            {"instruction": "a", "input": None, "output": "b", "system": None},
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answers_from": 0},
            id="alpaca-with-nulls",
        ),
    ],
)
def test_a_row_becomes_its_conversation(row: dict[str, Any], conversation: dict[str, Any]) -> None:
    assert made(row) == conversation


@pytest.mark.parametrize("role", ROLES)
def test_every_role_may_speak_beside_an_answer(role: str) -> None:
    spoken = {"role": role, "content": "a"}
    assert made({"messages": [spoken, ANSWER]})["messages"] == [spoken, ANSWER]


def test_what_is_not_ascii_stays_readable() -> None:
    row = {"prompt": "日本", "completion": "🙂"}
    assert "日本" in document(row, "completion", "a")["conversation"]


MESSAGES = [
    pytest.param(None, r"a:1: `messages` is missing, not a list of", id="null"),
    pytest.param("text", r"`messages` is str, not a list of", id="text"),
    pytest.param({"role": "user"}, r"`messages` is dict, not a list of", id="object"),
    pytest.param([], r"`messages` is empty: remove the row", id="empty"),
    pytest.param([ASK, "4"], r"`messages`, message 2 is str, not an object with role and content", id="word"),
    pytest.param([ASK, None], r"message 2 is NoneType, not an object", id="null-message"),
    pytest.param([{}], r"message 1 has no `role` \(it has: nothing\)", id="nothing"),
    pytest.param([{"role": None, "content": "a"}], r"has no `role` \(it has: content\)", id="role-null"),
    pytest.param([{"from": "gpt", "value": "a"}], r"has no `role` \(it has: from, value\)", id="sharegpts-names"),
    pytest.param([{"role": "User", "content": "a"}], r"message 1: role 'User' is not one of system, dev", id="capital"),
    pytest.param([{"role": ["user"], "content": "a"}], r"role \['user'\] is not one of", id="role-in-a-list"),
    pytest.param([{"role": "user"}, ANSWER], r"message 1: `content` is missing, not a string", id="no-content"),
    pytest.param([{"role": "user", "content": 4}, ANSWER], r"`content` is int, not a string", id="content-number"),
    pytest.param(
        [{"role": "user", "content": [{"type": "image"}]}, ANSWER], "has parts that are not text", id="picture"
    ),
    pytest.param([{"role": "user", "content": ["a"]}, ANSWER], "has parts that are not text", id="parts-as-words"),
    pytest.param(
        [{"role": "user", "content": [{"type": "text"}]}, ANSWER], "`content` is missing, not a string", id="empty-part"
    ),
    pytest.param([{"role": "user", "content": "\ud800"}, ANSWER], r"half a surrogate pair at character 0", id="half"),
    pytest.param([ASK, {"role": "assistant", "content": " \n"}], "message 2 is an empty answer: remove it", id="blank"),
    pytest.param([ASK, {"role": "assistant", "content": []}], "message 2 is an empty answer", id="no-parts"),
    pytest.param(
        [ASK, {"role": "assistant", "content": "", "tool_calls": []}], "message 2 is an empty answer", id="no-calls"
    ),
    pytest.param(
        [ASK, {"role": "assistant", "content": "", "reasoning_content": " "}], "message 2 is an empty", id="no-thought"
    ),
    pytest.param(
        [ASK, {"role": "tool", "content": "4"}, ASK],
        r"`messages` has no message of role assistant to train on \(roles: user, tool\)",
        id="no-answer",
    ),
]


@pytest.mark.parametrize(("messages", "words"), MESSAGES)
def test_wrong_messages_are_told_with_their_place(messages: object, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        document({"messages": messages}, "messages", "a:1")
    assert str(caught.value).startswith("a:1: `messages`")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        pytest.param({"text": b"a"}, r"^a:1: `text` is bytes, not a string$", id="bytes"),
        pytest.param(
            {"text": "ab\udfff"}, "^a:1: `text` holds half a surrogate pair at character 2$", id="half-a-pair"
        ),
        pytest.param({"prompt": "a", "completion": None}, "`completion` is missing, not a string", id="no-completion"),
        pytest.param({"prompt": "a", "completion": [ANSWER]}, "`completion` is list, not a string", id="text-and-list"),
        pytest.param({"prompt": [ASK], "completion": "4"}, "`completion` is str, not a list of", id="list-and-text"),
        pytest.param({"prompt": None, "completion": "4"}, "`prompt` is missing, not a list of", id="no-prompt"),
        pytest.param({"prompt": "a", "completion": "\t"}, "`completion` is empty: remove the row", id="blank"),
        pytest.param({"prompt": [], "completion": [ANSWER]}, "`prompt` is empty: remove the row", id="empty-prompt"),
        pytest.param({"prompt": [ASK], "completion": [ASK]}, "`completion` has no message of role assist", id="asked"),
        pytest.param({"conversations": "a"}, "`conversations` is str, not a list of", id="sharegpt-text"),
        pytest.param({"conversations": []}, "`conversations` is empty: remove the row", id="sharegpt-empty"),
        pytest.param({"conversations": [{"from": "gpt"}]}, "message 1: `content` is missing", id="sharegpt-no-value"),
        pytest.param({"conversations": [{"from": 3, "value": "a"}]}, "role 3 is not one of", id="sharegpt-number"),
        pytest.param({"instruction": None, "output": "b"}, "`instruction`, message 1: `content` is missing", id="none"),
        pytest.param({"instruction": "a", "output": 4}, "message 2: `content` is int", id="alpaca-number"),
        pytest.param({"instruction": "a", "output": ""}, "message 2 is an empty answer", id="alpaca-no-answer"),
        pytest.param(
            {"messages": [{**ASK, "more": {1, 2}}, ANSWER]},
            "^a:1 contains a value that is not JSON .*: use text",
            id="set",
        ),
        pytest.param({"prompt": "\udc00", "completion": "a"}, "half a surrogate pair", id="half-a-pair-in-a-prompt"),
    ],
)
def test_a_wrong_row_is_told_with_its_place(row: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        document(row, kind_of_row(row, "a:1"), "a:1")
    assert str(caught.value).startswith("a:1")


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_row_unlike_the_earlier_ones_is_told_which_column_it_lacks(kind: str) -> None:
    with pytest.raises(UserError, match=rf"has no column `{COLUMNS[kind][0]}` \(it has: other\), unlike earlier rows"):
        document({"other": 1}, kind, "a:2")
    with pytest.raises(UserError, match=rf"has no column `{COLUMNS[kind][-1]}` \(it has: "):
        document(dict.fromkeys(COLUMNS[kind][:-1], "a"), kind, "a:2")


def test_answers_that_say_so_are_not_learnt() -> None:
    asked = {**ASK, "weight": 1, "train": False}
    for mark in ({"weight": 0}, {"train": False}, {"training": False}, {"loss": False}):
        conversation = made({"messages": [asked, {**ANSWER, **mark}, ASK, {**ANSWER, "weight": 1}]})
        assert conversation["unlearnt"] == [1]
        assert conversation["messages"] == [ASK, ANSWER, ASK, ANSWER]
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}, {"from": "gpt", "value": "c"}]
    assert made({"conversations": turns})["unlearnt"] == [1]


def test_the_history_of_alpaca_comes_before_its_instruction() -> None:
    row = {"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]]}
    told = [(message["role"], message["content"]) for message in made(row)["messages"]]
    assert told == [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    assert made({**row, "history": '[["a", "b"]]'}) == made(row)
    assert len(made({**row, "history": None})["messages"]) == 3


def test_a_system_prompt_may_have_a_column_of_its_own() -> None:
    system = {"role": "system", "content": "s"}
    assert made({"messages": [ASK, ANSWER], "system": "s"}) == made({"messages": [system, ASK, ANSWER]})
    asked = {"prompt": [ASK], "completion": [ANSWER]}
    assert made({**asked, "system": "s"}) == made({**asked, "prompt": [system, ASK]})
    assert made({**asked, "system": " ", "label": 0, "weight": None, "loss": 2.5}) == made(asked)


def test_tools_and_calls_become_those_of_a_server_in_whatever_form_they_are_given() -> None:
    wanted = made({"messages": [ASK, CALLING], "tools": TOOLS})
    flat = {"type": "function", **TOOLS[0]["function"]}
    of_anthropic = {"name": "add", "input_schema": {"type": "object"}}
    for tools in (json.dumps(TOOLS), [json.dumps(TOOLS[0])], [TOOLS[0]["function"]], [flat], [of_anthropic]):
        assert made({"messages": [ASK, CALLING], "tools": tools}) == wanted
    for calls in (CALLING["tool_calls"], [CALL], [{"function": CALL}], [json.dumps(CALL)], json.dumps([CALL])):
        assert made({"messages": [ASK, {"role": "assistant", "tool_calls": calls}], "tools": TOOLS}) == wanted
    assert "tools" not in made({"messages": [ASK, ANSWER], "tools": ""})


def test_arguments_of_calls_stay_json_text_and_none_are_an_empty_object() -> None:
    for given, kept in (('{"a": 2}', '{"a": 2}'), ("", {}), (None, {})):
        call = made({"messages": [ASK, {"role": "assistant", "tool_calls": [{"name": "add", "arguments": given}]}]})
        assert call["messages"][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": kept}


def test_several_calls_may_be_one_turn_of_sharegpt() -> None:
    turns = [{"from": "human", "value": "a"}, {"from": "function_call", "value": json.dumps([CALL, CALL])}]
    assert made({"conversations": turns})["messages"][1]["tool_calls"] == CALLING["tool_calls"] * 2


@pytest.mark.parametrize(
    "empty", [{"tool_calls": []}, {"tool_calls": ""}, {"reasoning_content": ""}, {"thinking": " "}]
)
def test_empty_calls_and_thoughts_are_none(empty: dict[str, Any]) -> None:
    assert made({"messages": [ASK, {**ANSWER, **empty}]}) == made({"messages": [ASK, ANSWER]})


def test_an_empty_answer_may_stand_where_it_is_not_learnt() -> None:
    empty = {"role": "assistant", "content": ""}
    conversation = made({"messages": [ASK, {**empty, "weight": 0}, ASK, ANSWER]})
    assert conversation["messages"] == [ASK, empty, ASK, ANSWER] and conversation["unlearnt"] == [1]
    assert made({"prompt": [ASK, empty, ASK], "completion": [ANSWER]})["messages"][1] == empty


def test_an_answer_may_be_thoughts_alone() -> None:
    thoughts = {"role": "assistant", "reasoning_content": "so"}
    assert made({"messages": [ASK, thoughts]})["messages"][1] == {**thoughts, "content": ""}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        pytest.param({"messages": [ASK, {**ANSWER, "weight": 0}]}, "has no answer to train on", id="nothing-left"),
        pytest.param(
            {"messages": [ASK, {**ANSWER, "weight": 0.5}]}, "message 2: `weight` is 0.5: give 0 or 1", id="half"
        ),
        pytest.param(
            {"messages": [ASK, {**ANSWER, "train": "no"}]}, "message 2: `train` is 'no': give true", id="word"
        ),
        pytest.param({"messages": [{**ASK, "train": True}, ANSWER]}, "message 1: `train` is true, but only", id="user"),
        pytest.param({"messages": [ASK, {**ANSWER, "train_detail": [1]}]}, "message 2 has `train_detail`", id="parts"),
        pytest.param(
            {"messages": [ASK, ANSWER], "images": ["a.png"]}, "a:1 has `images`, which is not used", id="images"
        ),
        pytest.param({"text": "a", "image": {"path": "a.png"}}, "a:1 has `image`, which is not used", id="image"),
        pytest.param({"messages": [{**ASK, "images": ["a.png"]}, ANSWER]}, "message 1 has `images`", id="of-a-message"),
        pytest.param({"messages": [ASK, ANSWER], "functions": TOOLS}, "write them as `tools`", id="functions"),
        pytest.param(
            {"messages": [ASK, {**ANSWER, "function_call": CALL}]}, "write it as `tool_calls`", id="function-call"
        ),
        pytest.param(
            {"messages": [ASK, ANSWER], "rejected": [ANSWER]}, "train on preferences with --preference", id="preference"
        ),
        pytest.param({"prompt": "a", "completion": "b", "label": False}, "`label` is False", id="label"),
        pytest.param({"messages": [ASK, ANSWER], "weight": 0.3}, "`weight` is 0.3", id="weight"),
        pytest.param({"instruction": "a", "output": "b", "train": "false"}, "`train` is 'false'", id="train"),
        pytest.param({"prompt": "a", "completion": "b", "system": "c"}, "write it into the prompt", id="system"),
        pytest.param(
            {"messages": [{"role": "system", "content": "a"}, ASK, ANSWER], "system": "c"}, "keep one", id="two-systems"
        ),
        pytest.param({"messages": [ASK, ANSWER], "tools": "[{"}, "`tools` is a text that is not JSON", id="tools"),
        pytest.param(
            {"messages": [ASK, ANSWER], "tools": '{"a": 1}'}, "`tools` is dict, not a list of tools", id="one-tool"
        ),
        pytest.param({"messages": [ASK, ANSWER], "tools": [3]}, "`tools`, tool 1 is int, not an object", id="no-tool"),
        pytest.param({"messages": [ASK, ANSWER], "tools": [{"type": "web_search"}]}, "tool 1 is not a func", id="kind"),
        pytest.param({"messages": [ASK, {**CALLING, "tool_calls": CALL}]}, "`tool_calls` is dict, not a", id="call"),
        pytest.param(
            {"messages": [ASK, {**CALLING, "tool_calls": [{"arguments": 1}]}]}, "call 1 has no `name`", id="n"
        ),
        pytest.param(
            {"messages": [ASK, {**CALLING, "tool_calls": [{"name": "add", "parameters": {"a": 2}}]}]},
            "call 1 has `parameters`, which a call does not have",
            id="arguments-under-another-name",
        ),
        pytest.param(
            {"messages": [ASK, {**CALLING, "tool_calls": [{"function": CALL, "result": 4}]}]},
            "call 1 has `result`, which a call does not have",
            id="result-in-a-call",
        ),
        pytest.param(
            {"messages": [ASK, {**CALLING, "tool_calls": [{**CALL, "arguments": "a = 2"}]}]},
            "call 1: `arguments` is a text that is not JSON",
            id="arguments-of-another-language",
        ),
        pytest.param(
            {"messages": [ASK, {**CALLING, "tool_calls": [{**CALL, "arguments": [2, 2]}]}]},
            "call 1: `arguments` are list, not an object",
            id="arguments-without-names",
        ),
        pytest.param(
            {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "add(2, 2)"}]},
            "`conversations`, message 2 is a text that is not JSON",
            id="sharegpt-call",
        ),
        pytest.param(
            {"instruction": "a", "output": "b", "history": [["a"]]}, "`history`, turn 1 is not a pair", id="turn"
        ),
        pytest.param({"instruction": "a", "output": "b", "history": 3}, "`history` is int, not a list", id="history"),
    ],
)
def test_what_would_not_be_used_is_refused(row: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        made(row)
    assert str(caught.value).startswith("a:1") and "\n" not in str(caught.value)
