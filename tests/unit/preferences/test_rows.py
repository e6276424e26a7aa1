"""Rows of TRL, axolotl and ShareGPT become pairs; what cannot be one is refused with its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.errors import UserError
from harness.preferences.rows import labelled, pair


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


ASKED, GOOD, BAD = said("user", "2 + 2?"), said("assistant", "4"), said("assistant", "5")
SYSTEM = said("system", "Be brief.")


def messages(document: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    parsed = json.loads(document)
    return parsed["messages"][: parsed["answers_from"]], parsed["messages"][parsed["answers_from"] :]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        pytest.param({"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, [ASKED], id="trl"),
        pytest.param({"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, [ASKED], id="trl-implicit"),
        pytest.param(
            {"prompt": "2 + 2?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "messages": [ASKED, GOOD]},
            [ASKED],
            id="ultrafeedback",
        ),
        pytest.param({"prompt": "2 + 2?", "chosen": [GOOD], "rejected": [BAD]}, [ASKED], id="a-text-and-messages"),
        pytest.param(
            {"system": "Be brief.", "question": "2 + 2?", "chosen": "4", "rejected": "5"}, [SYSTEM, ASKED], id="intel"
        ),
        pytest.param(
            {"system": "", "instruction": "2 + 2?", "chosen_response": "4", "rejected_response": "5"},
            [ASKED],
            id="argilla",
        ),
        pytest.param({"input": "2 + 2?", "chosen": "4", "rejected": "5"}, [ASKED], id="icr"),
        pytest.param(
            {"instruction": "Add.", "input": "2 + 2?", "chosen": "4", "rejected": "5"},
            [said("user", "Add.\n\n2 + 2?")],
            id="alpaca",
        ),
        pytest.param(
            {"messages": [SYSTEM, ASKED], "chosen": GOOD, "rejected": BAD}, [SYSTEM, ASKED], id="chat-template"
        ),
        pytest.param(
            {
                "conversations": [{"from": "human", "value": "2 + 2?"}],
                "chosen": {"from": "gpt", "value": "4"},
                "rejected": {"from": "gpt", "value": "5"},
            },
            [ASKED],
            id="sharegpt",
        ),
        pytest.param({"prompt": [ASKED], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, [ASKED], id="repeated"),
    ],
)
def test_a_chat_is_a_prompt_and_two_answers(row: dict[str, Any], prompt: list[dict[str, str]]) -> None:
    chosen, rejected = pair(row, "a.jsonl:1")
    assert messages(chosen.text) == (prompt, [GOOD])
    assert messages(rejected.text) == (prompt, [BAD])


def test_texts_are_continued_as_they_are_and_a_common_beginning_is_the_prompt() -> None:
    found = [json.loads(each.text) for each in pair({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}, "a:1")]
    assert found == [{"prompt": "2 + 2 =", "completion": " 4"}, {"prompt": "2 + 2 =", "completion": " 5"}]
    assert [json.loads(each.text) for each in pair({"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"}, "a:1")] == found


@pytest.mark.parametrize(
    ("row", "words"),
    [
        pytest.param(
            {"prompt": "a", "chosen": "b", "rejected": "b"}, "a.jsonl:3: `chosen` and `rejected` are equal", id="equal"
        ),
        pytest.param({"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD]}, "a.jsonl:3: `chosen` and", id="equal-chats"),
        pytest.param(
            {"question": "a", "chosen": "b", "rejected": [said("assistant", "b")]}, "are equal", id="in-two-forms"
        ),
        pytest.param({"prompt": "a", "chosen": " ", "rejected": "b"}, "a.jsonl:3: `chosen` is empty", id="empty"),
        pytest.param({"prompt": " ", "chosen": "b", "rejected": "c"}, "a.jsonl:3: the prompt is empty", id="no-prompt"),
        pytest.param({"chosen": "b", "rejected": "c"}, "a.jsonl:3: the prompt is empty", id="nothing-in-common"),
        pytest.param({"prompt": [], "chosen": [GOOD], "rejected": [BAD]}, "the prompt is empty", id="no-question"),
        pytest.param(
            {"prompt": [said("user", "")], "chosen": [GOOD], "rejected": [BAD]}, "the prompt is empty", id="silence"
        ),
        pytest.param({"prompt": [ASKED], "chosen": [GOOD], "rejected": []}, "`rejected` is empty", id="no-message"),
        pytest.param(
            {"prompt": [ASKED], "chosen": [said("assistant", "")], "rejected": [BAD]}, "`chosen` is empty", id="silent"
        ),
        pytest.param({"chosen": [ASKED], "rejected": [ASKED, BAD]}, "`chosen` is empty", id="nothing-of-its-own"),
        pytest.param(
            {"prompt": "a", "chosen": "b"}, "a.jsonl:3 has no column `rejected` .it has: prompt, chosen.", id="missing"
        ),
        pytest.param({"prompt": "a", "chosen": "b", "rejected": None}, "a.jsonl:3: `rejected` is missing", id="null"),
        pytest.param({"prompt": "a", "completion": "b", "label": True}, "has no column `chosen`", id="labelled"),
        pytest.param({"prompt": "a", "chosen": 3, "rejected": "b"}, "`chosen` is int: give a text", id="a-number"),
        pytest.param(
            {"prompt": [ASKED], "chosen": [said("user", "b")], "rejected": [BAD]}, "no message of role", id="role"
        ),
        pytest.param(
            {"system": "x", "prompt": "a", "chosen": "b", "rejected": "c"}, "write both as messages", id="system"
        ),
    ],
)
def test_a_row_that_is_no_pair_is_refused_with_its_place(row: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        pair(row, "a.jsonl:3")
    assert str(caught.value).startswith("a.jsonl:3") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        pytest.param({"prompt": [ASKED], "completion": [GOOD], "label": True}, [True], id="trl"),
        pytest.param({"question": "2 + 2?", "completion": "4", "label": 0}, [False], id="a-question"),
        pytest.param({"completion": [ASKED, GOOD], "label": "True"}, [True], id="argilla-chat"),
        pytest.param({"messages": [ASKED, GOOD], "label": False}, [False], id="messages"),
        pytest.param({"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, [True, False], id="a-pair"),
    ],
)
def test_a_completion_has_a_label(row: dict[str, Any], wanted: list[bool]) -> None:
    found = list(labelled(row, "a.jsonl:1"))
    assert [each.desirable for each in found] == wanted
    assert messages(found[0].text) == ([ASKED], [GOOD])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        pytest.param({"prompt": "a", "completion": "b"}, "no column `label`", id="missing"),
        pytest.param({"prompt": "a", "completion": "b", "label": 0.7}, "`label` is 0.7: give true", id="a-score"),
        pytest.param({"prompt": "a", "completion": "", "label": True}, "`completion` is empty", id="empty"),
        pytest.param({"completion": "b", "label": True}, "has no `prompt`", id="no-prompt"),
        pytest.param({"prompt": "", "completion": "b", "label": True}, "a.jsonl:3: the prompt is empty", id="silence"),
    ],
)
def test_a_completion_without_label_or_prompt_is_refused(row: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        list(labelled(row, "a.jsonl:3"))
