"""The rule of chat data, over templates and rows: what is trained is what is served, whole, and stops; or a refusal.

The templates beside this file have one kind of structure each. More are taken from the folder that CHAT_TEMPLATES
names, or from the package trl where it is installed.
"""

from __future__ import annotations

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from harness.data.answers import Answers, find_answers
from harness.data.conversation import forms
from harness.data.rows.kinds import document, kind_of_row
from harness.errors import UserError
from tests.unit.data.test_chat_templates import TEMPLATES, assistant, learnt, template_of, user

PLACE = "a.jsonl:7"


def published() -> dict[str, str]:
    """Templates of other programs, by name; none where nothing provides any."""
    trl = find_spec("trl")
    folders = [Path(os.environ.get("CHAT_TEMPLATES", "/nonexistent"))]
    folders += [Path(place, "chat_templates") for place in (trl.submodule_search_locations or [] if trl else [])]
    files = [file for folder in folders for file in sorted(folder.glob("*.jinja"))]
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


PUBLISHED = published()


def tool(name: str, parameter: str, description: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string", "description": f"{description}-p"}, "days": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return {"name": name, "description": description, "parameters": parameters}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": f"call-{name}", "function": {"name": name, "arguments": arguments}}


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TOOLS = [tool("wetter", "stadt", "tells-weather"), tool("rechne", "erste", "adds-up")]
WEATHER, SUM = call("wetter", stadt="Oslo-a", days=731), call("rechne", erste="8642-b", days=19)
TOLD = said("tool", "result-1", tool_call_id="call-wetter", name="wetter")
TOLD_TOO = said("tool", "result-2", tool_call_id="call-rechne", name="rechne")
ASKED, ANSWERED, ASKED_AGAIN, LAST = user("ask-1"), assistant("answer-1"), user("ask-2"), assistant("answer-2")
AS_TEXT = {**WEATHER, "function": {"name": "wetter", "arguments": '{"stadt": "Oslo-a", "days": 731}'}}
SHAREGPT = [
    {"from": "human", "value": "ask-1"},
    {"from": "function_call", "value": json.dumps(WEATHER["function"])},
    {"from": "observation", "value": "result-1"},
    {"from": "gpt", "value": "answer-1"},
]
ROWS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [ASKED, ANSWERED, ASKED_AGAIN, LAST]},
    "system": {"messages": [said("system", "rules-1"), ASKED, ANSWERED]},
    "late system": {"messages": [ASKED, ANSWERED, said("system", "rules-2"), ASKED_AGAIN, LAST]},
    "unknown role": {"messages": [said("developer", "rules-3"), ASKED, ANSWERED]},
    "thoughts": {
        "messages": [
            ASKED,
            {**ANSWERED, "reasoning_content": "thought-1"},
            ASKED_AGAIN,
            {**LAST, "reasoning_content": "thought-2"},
        ]
    },
    "thought in text": {"messages": [ASKED, assistant("<think>\nthought-1\n</think>\n\nanswer-1")]},
    "empty answer": {"messages": [ASKED, assistant("", weight=0), ASKED_AGAIN, LAST]},
    "nothing": {"messages": [ASKED, assistant("answer-1", tool_calls=[], reasoning_content="")]},
    "tools": {"messages": [ASKED, ANSWERED], "tools": json.dumps(TOOLS)},
    "call": {"messages": [ASKED, {"role": "assistant", "tool_calls": [AS_TEXT]}, TOLD, ANSWERED], "tools": TOOLS},
    "calls": {
        "messages": [ASKED, {"role": "assistant", "tool_calls": [WEATHER, SUM]}, TOLD, TOLD_TOO, ANSWERED],
        "tools": TOOLS,
    },
    "call and text": {"messages": [ASKED, assistant("text-1", tool_calls=[WEATHER])], "tools": TOOLS},
    "sharegpt": {"conversations": SHAREGPT, "tools": TOOLS},
    "key": {"messages": [{**ASKED, "name": "name-1"}, assistant("answer-1", remark="remark-1")]},
    "image": {"messages": [said("user", "")]},
}
ROWS["image"]["messages"] = [{"role": "user", "content": [{"type": "image"}]}, ANSWERED]
WORD = re.compile(r"[\w]+-\w+|\b(?:wetter|rechne|stadt|erste|days|731|19)\b")


def found(source: str, row: dict[str, Any]) -> tuple[dict[str, Any], set[int], Answers]:
    conversation = json.loads(document(row, kind_of_row(row, PLACE), PLACE)["conversation"])
    answers = {i for i, message in enumerate(conversation["messages"]) if message["role"] == "assistant"}
    answers -= set(conversation.get("unlearnt", ()))
    tools = conversation.get("tools")
    return conversation, answers, find_answers(template_of(source), conversation["messages"], tools, answers, PLACE)


def prompts(source: str, conversation: dict[str, Any], before: int) -> set[str]:
    """What a server writes before the message at `before`, by the forms in which it may hand on messages."""
    written = set()
    for form in forms(conversation["messages"]):
        try:
            (text,), _ = render_jinja_template(
                conversations=[form[:before]],
                tools=conversation.get("tools"),
                chat_template=source,
                add_generation_prompt=True,
                bos_token="<s>",
                eos_token="</s>",
            )
        except Exception:  # the template rejects this form
            continue
        written.add(text)
    return written


def words(value: Any) -> set[str]:
    """The words of a part of a row that no template translates; ids link messages and need not be written."""
    return {word for word in WORD.findall(json.dumps(value).replace("\\n", " ")) if not word.startswith("call-")}


def require_rule(source: str, row: dict[str, Any]) -> None:
    try:
        conversation, answers, made = found(source, row)
    except UserError as error:
        assert str(error).startswith(PLACE) and "\n" not in str(error)
        return
    messages, spans = conversation["messages"], [made.text[start:end] for start, end in made.spans]
    question = max(i for i, message in enumerate(messages) if message["role"] == "user")
    for index, message in enumerate(messages):
        kept = {key: value for key, value in message.items() if key != "reasoning_content" or index > question}
        if message["role"] == "tool":
            kept.pop("name", None)
        assert all(word in made.text for word in words(kept)), (index, words(kept))
        for word in words(kept):
            assert any(word in span for span in spans) == (index in answers), (index, word)
    assert all(word in made.text for word in words(conversation.get("tools", [])))
    last = max(answers)
    if last == len(messages) - 1:
        start, _ = made.spans[-1]
        assert made.text[:start] in prompts(source, conversation, last)
        assert template_of(source).first_token(spans[-1].rstrip()[-40:]), spans[-1]
        assert spans[-1].rstrip()[-1] in ">][", spans[-1]


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_row_is_trained_as_it_is_served_or_refused(name: str) -> None:
    for row in ROWS.values():
        require_rule(TEMPLATES[name], row)


@pytest.mark.skipif(not PUBLISHED, reason="neither CHAT_TEMPLATES nor the package trl provides templates")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_follow_the_rule(name: str) -> None:
    for row in ROWS.values():
        require_rule(PUBLISHED[name], row)


def test_rows_of_most_kinds_are_trained_under_some_template() -> None:
    hermes, dense = TEMPLATES["calls_of_hermes"], TEMPLATES["thoughts_behind_the_last_question"]
    for kind in ("plain", "system", "late system", "empty answer", "nothing", "tools", "call", "calls", "sharegpt"):
        assert found(hermes, ROWS[kind])[2].spans, kind
    for kind in ("thoughts", "thought in text", "call and text"):
        assert found(dense, ROWS[kind])[2].spans, kind


# -- what is left out, and what the message says -----------------------------------------------------------------

TURN = "<{{ m.role }}>{{ m.content }}<end>"
END = "{% if add_generation_prompt %}<assistant>{% endif %}"


def every(turn: str, end: str = END) -> str:
    return "{% for m in messages %}" + turn + "{% endfor %}" + end


USER_ONLY = every("{% if m.role in ('user', 'assistant') %}" + TURN + "{% endif %}")
FIRST_SYSTEM = every("{% if m.role != 'system' or loop.first %}" + TURN + "{% endif %}")
UNKNOWN_AS_USER = every("<{{ 'assistant' if m.role == 'assistant' else 'user' }}>{{ m.content }}<end>")
NAMES_OF_CALLS = every(TURN.replace("<end>", "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}<end>"))
ONE_ARGUMENT = every(
    "<{{ m.role }}>{{ m.content if not m.tool_calls }}{% for c in m.tool_calls %}<call>{{ c.function.name }} "
    "{{ c.function.arguments.stadt }}{% endfor %}<end>"
)
TOOL_NAMES = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + every(TURN)


@pytest.mark.parametrize(
    ("template", "row", "reason"),
    [
        pytest.param(
            USER_ONLY,
            ROWS["unknown role"],
            "message 1: the chat template does not write a message of role developer",
            id="role",
        ),
        pytest.param(
            FIRST_SYSTEM,
            ROWS["late system"],
            "message 3: the chat template does not write a message of role system",
            id="late-system",
        ),
        pytest.param(
            UNKNOWN_AS_USER,
            ROWS["late system"],
            "message 3: the chat template writes role system as it writes role user",
            id="alike",
        ),
        pytest.param(
            every(TURN),
            ROWS["thoughts"],
            "message 2: the chat template does not write `reasoning_content`",
            id="thoughts",
        ),
        pytest.param(every(TURN), ROWS["key"], "message 2: the chat template does not write `remark`", id="key"),
        pytest.param(
            every(TURN), {"messages": [{**ASKED, "name": "Ann"}, ANSWERED]}, "message 1: .* `name`", id="name"
        ),
        pytest.param(every(TURN), ROWS["tools"], "the chat template does not write `tools`", id="tools"),
        pytest.param(TOOL_NAMES, ROWS["tools"], "does not write `description` of tool 1", id="tool"),
        pytest.param(
            NAMES_OF_CALLS, {"messages": ROWS["call and text"]["messages"]}, "not write its tool calls", id="call"
        ),
        pytest.param(
            ONE_ARGUMENT, {"messages": ROWS["call"]["messages"]}, "message 2: .* `days` of its tool", id="number"
        ),
        pytest.param(
            ONE_ARGUMENT,
            {"messages": [ASKED, assistant("text-1", tool_calls=[call("wetter", stadt="Oslo")])]},
            "message 2: the chat template does not write the text beside its tool calls",
            id="text-beside-a-call",
        ),
        pytest.param(
            every("{% if m.content %}" + TURN + "{% endif %}"),
            ROWS["empty answer"],
            "message 2: the chat template does not write an empty message",
            id="empty-message",
        ),
        pytest.param(
            every(TURN, "{% if add_generation_prompt %}<assistant><think>{% endif %}"),
            ROWS["plain"],
            "message 2: the generation prompt of the chat template ends with '<think>'",
            id="prompt",
        ),
        pytest.param(
            every("{{ m.role }}: {{ m.content }}\n", "assistant:"),
            ROWS["plain"],
            "writes no token that ends",
            id="no-token",
        ),
        pytest.param(
            every("<{{ m.role }}>{{ m.content }}"),
            ROWS["late system"],
            "message 2: no token that a model writes ends this answer, as a message of role system follows",
            id="no-stop-before-a-system-message",
        ),
    ],
)
def test_what_a_template_leaves_out_is_named_with_its_place(template: str, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=rf"^a\.jsonl:7.*{reason}") as caught:
        found(template, row)
    assert "\n" not in str(caught.value)


def test_a_turn_that_the_next_one_ends_is_learnt_with_its_token() -> None:
    template = every("<{{ m.role }}>{{ m.content }}")
    assert learnt(template, ROWS["plain"]["messages"]) == ["answer-1<user>", "answer-2<user>"]


def test_the_thought_that_a_prompt_opens_and_closes_stands_before_the_last_answer() -> None:
    template = every(TURN, "{% if add_generation_prompt %}<assistant><think>\n</think>{% endif %}")
    made = found(template, ROWS["system"])[2]
    assert made.text == "<system>rules-1<end><user>ask-1<end><assistant><think>\n</think>answer-1<end>"
    assert [made.text[start:end] for start, end in made.spans] == ["answer-1<end>"]


def test_a_thought_is_taken_under_the_name_that_the_template_reads() -> None:
    template = every("<{{ m.role }}>{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}<end>")
    row = {"messages": [ASKED, {**ANSWERED, "reasoning_content": "thought-1"}]}
    assert learnt(template, row["messages"]) == ["<think>thought-1</think>answer-1<end>"]
