"""Converts rows (JSON objects) to records, in the formats of `DataSource.format`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.records import Demonstration, Labelled, Preference, Prompt, Record, like, plain_fields
from dovetail.coordinator.data.row_format import Row, RowFormat
from dovetail.coordinator.data.text.chat_template import (
    ASSISTANT,
    ASSISTANTS,
    ChatFormat,
    HumanAssistant,
    Message,
    NotWritten,
    TemplateRefused,
    WithSystem,
)
from dovetail.coordinator.data.text.conversations import (
    SAID,
    Conversation,
    conversation,
    demonstration,
    tools_of,
    type_name,
)
from dovetail.manifest.fixed_names import DataKind
from dovetail.manifest.types import TemplateUse

PROMPT_FIELDS = ("prompt", "instruction", "question", "query", "problem")
RESPONSE_FIELDS = ("response", "completion", "output", "answer", "solution")
MESSAGE_FIELDS = ("messages", "conversations")
# The second is LLaMA-Factory's.
LABEL_FIELDS = ("label", "kto_tag")
EMPTY: tuple[Any, ...] = (None, "", [], {})

_PARTS = (Demonstration, Preference, Labelled, Prompt)


def detect(row: Row, where: str, kind: DataKind | None = None) -> str:
    """The name of a row's format, which follows from its fields. `kind` is the kind of record that a stage needs, if it
    is known. For preferences, formats that judge replies come first, because a row may have a whole dialogue beside its
    pair. Raises DataError if no format fits."""
    fitting = [each for each in FORMATS.values() if each.fits(row)]
    if kind == "preferences":
        fitting.sort(key=lambda each: not each.judged)
    if fitting:
        return fitting[0].name
    lists = (name for name, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict))
    listed = next((f"; if {name!r} holds the records, write this list alone into the file" for name in lists), "")
    raise DataError(
        f"{where}: cannot tell the format of a record with {_has(row)}; name the fields prompt and response, "
        f"chosen and rejected, messages, or text, or set the source's format{listed}"
    )


def convert(row: Row, fmt: str, kind: DataKind, chat: ChatFormat, where: str, template: TemplateUse = "Auto") -> Record:
    """The record of `kind` in the row. `template`: the field of its source. Raises DataError. Its message begins with
    `where`, which names the file and line, or the data set and row."""
    chosen = FORMATS[fmt]
    if kind == "preferences" and not chosen.judged:
        if _first(row, LABEL_FIELDS) is not None and _first(row, RESPONSE_FIELDS) is not None:
            _label(row, where)
        better = detect(row, where, kind)
        if FORMATS[better].judged:
            raise DataError(
                f"{where}: format {fmt} holds no preferences, but this record has those of format {better}; set the "
                f"source's format to {better}"
            )
        raise DataError(
            f"{where}: spec.data.preferences needs records with chosen and rejected replies, or with prompt, response "
            f"and label, but this one has {_has(row)}"
        )
    given, row = row, as_messages(row, fmt, chat, where, template)
    if isinstance(chat, WithSystem) and not is_dialogue(row):
        raise DataError(
            f"{where}: a system prompt opens conversations, but this record is no list of messages; write messages, "
            "or remove systemPrompt"
        )
    if is_dialogue(row):
        if tools := tools_in(given, where):
            chat = chat.with_tools(tools)
        if system := _system(row):
            chat = WithSystem(chat.chat if isinstance(chat, WithSystem) else chat, system)
    try:
        record = chosen.read(row, kind, chat, where)
    except NotWritten as error:
        raise DataError(f"{where}: {error}") from error
    except TemplateRefused as error:
        raise DataError(f"{where}: the tokenizer's chat template refuses the conversation: {error}") from error
    if isinstance(record, Prompt):
        record = Prompt(record.prompt, plain_fields(record.fields, where))
    for text in _texts(record):
        _check_characters(text, where)
    return record


def _texts(value: Any) -> Iterator[str]:
    """Every text in a record. Fields of the row that the record leaves out are not checked."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, _PARTS):
        yield from (text for name in value.__slots__ for text in _texts(getattr(value, name)))
    elif isinstance(value, Mapping):
        yield from (text for each in (*value.keys(), *value.values()) for text in _texts(each))
    elif isinstance(value, list | tuple):
        yield from (text for each in value for text in _texts(each))


def _check_characters(text: str, where: str) -> None:
    """Raises DataError for a surrogate without the other half of its pair. JSON can write it, but UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise DataError(
            f"{where}: the record holds '{half}', half of a character; write the whole character, or remove it"
        ) from None


def left_out(row: Row, fmt: str, kind: DataKind, where: str) -> bool:
    """Whether a list of preferences leaves the row out, because no reply of it is better than another."""
    return kind == "preferences" and FORMATS[fmt].no_pair(row, where)


def needed_fields(
    row: Row, fmt: str, kind: DataKind, chat: ChatFormat, where: str, template: TemplateUse = "Auto"
) -> dict[str, bool]:
    """For each field that is not empty: whether it changes the record that `convert` makes of the row. Fields of
    messages have names such as messages[].name. Raises DataError as `convert` does."""
    record = convert(row, fmt, kind, chat, where, template)

    def changes(other: Row) -> bool:
        try:
            return convert(other, fmt, kind, chat, where, template) != record
        except DataError:
            return True

    needed = {name: changes(_without(row, name)) for name, value in row.items() if value not in EMPTY}
    for field in (name for name in (*MESSAGE_FIELDS, *PROMPT_FIELDS) if _are_messages(row.get(name))):
        for name in sorted({key for each in row[field] for key, value in each.items() if value not in EMPTY} - SAID):
            other = {**row, field: [_without(each, name) for each in row[field]]}
            needed[f"{field}[].{name}"] = changes(other)
    return needed


def _without(row: Row, name: str) -> dict[str, Any]:
    return {other: row[other] for other in row if other != name}


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(message, Mapping) for message in value)


def is_dialogue(row: Row) -> bool:
    """Whether a row holds messages, which a chat template turns into text."""
    if any(isinstance(row.get(name), list) for name in (*MESSAGE_FIELDS, *PROMPT_FIELDS)):
        return True
    return isinstance(row.get("chosen"), list | Mapping) or bool(_history(row))


def tools_in(row: Row, where: str) -> list[Mapping[str, Any]]:
    """The function schemas of a conversation. In a record whose prompt is a text, a text of this name may be anything.
    Raises DataError."""
    return tools_of(row, where) if is_dialogue(row) or isinstance(row.get("tools"), list) else []


def _system(row: Row) -> str:
    """The record's own system message. "" if it has none."""
    system = row.get("system")
    return system if isinstance(system, str) and system.strip() else ""


def _history(row: Row) -> list[Message]:
    """The turns before an instruction, as LLaMA-Factory reads Alpaca's records: a list of pairs of texts."""
    history = row.get("history")
    pairs = history if isinstance(history, list) else []
    if not all(map(_is_pair, pairs)):
        return []
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)


def as_messages(row: Row, fmt: str, chat: ChatFormat, where: str, template: TemplateUse) -> Row:
    """The row with the text of its prompt as a list of messages, if a chat template is to write it, or if it belongs to
    a conversation: the row has earlier turns or a system message. Raises DataError."""
    asked, before = _first(row, PROMPT_FIELDS), _history(row)
    is_text = fmt in _INSTRUCTIONS and asked is not None and isinstance(row[asked], str)
    own = has_template(chat)
    pairs = row.get("history")
    if is_text and not before and isinstance(pairs, list) and any(isinstance(pair, list) for pair in pairs):
        wrong = next(i for i, pair in enumerate(pairs) if not _is_pair(pair))
        raise DataError(
            f"{where}: item {wrong} of field 'history' must be a pair of texts, question and answer; complete it, "
            "or remove it"
        )
    if template == "Never" and is_text and (before or _system(row)):
        name = "history" if before else "system"
        raise DataError(
            f"{where}: template is Never, but this record has the field {name!r}, which only a conversation can say; "
            "take Auto, or write it into the prompt and remove the field"
        )
    if template == "Always" and not own:
        raise DataError(f"{where}: template is Always, but the tokenizer has no chat template; take Auto or Never")
    if template == "Always" and not is_text and not is_dialogue(row):
        raise DataError(
            f"{where}: template is Always, but this record has {_has(row)} and no prompt that a message could hold; "
            "take Auto or Never"
        )
    if template == "Never" or not is_text or not (own or before or _system(row)):
        return row
    if isinstance(chosen := row.get("chosen"), list) and len(chosen) > 1:
        return row  # the replies are whole conversations, which begin with the prompt
    assert asked is not None
    prompt = _prompt_text(row, asked, where)
    if (
        own
        and template == "Auto"
        and (opening := _answer_opening(cast(Hashable, chat)))
        and prompt.rstrip().endswith(opening)
    ):
        raise DataError(
            f"{where}: the prompt is written with the tokenizer's chat template already, for it ends with {opening!r}; "
            "set the source's template to Never, or write the user's words alone"
        )
    made = {**row, asked: [*before, {"role": "user", "content": prompt}]}
    rejected = row.get("rejected")
    if isinstance(chosen, str) and isinstance(rejected, str):
        replies = _without_prompt(prompt, chosen, rejected)
        if replies != (chosen, rejected):
            made["chosen"], made["rejected"] = (reply.lstrip() for reply in replies)
    return made


# The formats in which a prompt may be a text that a user would write.
_INSTRUCTIONS = ("PromptResponse", "ChosenRejected", "Labelled", "Completions")


def has_template(chat: ChatFormat) -> bool:
    """Whether the format is that of a tokenizer's own chat template."""
    return not isinstance(chat.chat if isinstance(chat, WithSystem) else chat, HumanAssistant)


@lru_cache(maxsize=16)
def _answer_opening(chat: Any) -> str:
    """The last line that a chat template writes before an answer. "" if it writes none."""
    said = "?!?"
    try:
        text = str(chat.prompt([{"role": "user", "content": said}]))
    except (NotWritten, TemplateRefused):
        return ""
    return text.rpartition(said)[2].strip().rpartition("\n")[2]


def _prompt_response(row: Row, kind: DataKind, chat: ChatFormat, where: str) -> Record:
    name = _need(row, PROMPT_FIELDS, where)
    if isinstance(row[name], list):
        return _prompt_messages(row, name, kind, chat, where)
    prompt = _prompt_text(row, name, where)
    if kind == "prompts":
        return Prompt(prompt, _others(row, name))
    response = _string(row, _need(row, RESPONSE_FIELDS, where), where)
    return Demonstration.of(prompt, response)


def _prompt_text(row: Row, name: str, where: str) -> str:
    """The prompt that is the text of field `name`."""
    prompt = _filled(_string(row, name, where), name, where)
    context = row.get("input")
    if name == "instruction" and isinstance(context, str) and context:
        # In Alpaca's records, the field `input` says what the instruction is about.
        prompt = f"{prompt}\n{context}"
    return prompt


def _prompt_messages(row: Row, name: str, kind: DataKind, chat: ChatFormat, where: str) -> Record:
    """A prompt that is a list of messages. The response is a text, or the messages that follow. Only the response is
    learnt."""
    given = conversation(row[name], name, where)
    if kind == "prompts":
        return Prompt(chat.prompt(_asked(given, name, where)), _others(row, name))
    answer = _need(row, RESPONSE_FIELDS, where)
    if isinstance(row[answer], list):
        replies = conversation(row[answer], answer, where)
    else:
        replies = Conversation([{"role": "assistant", "content": _string(row, answer, where)}], [True])
    # The turns of a record's history are examples as the last one is. Those of a prompt are not.
    return demonstration((given if _history(row) else given.unlearnt()) + replies, answer, chat, where)


def _labelled(row: Row, kind: DataKind, chat: ChatFormat, where: str) -> Record:
    if kind == "demonstrations" and (bad := next((each for each in LABEL_FIELDS if row.get(each) is False), None)):
        raise DataError(f"{where}: field {bad!r} is false, so SFT must not learn this response; remove the record")
    name = None if _first(row, PROMPT_FIELDS) else _need(row, MESSAGE_FIELDS, where)
    if kind != "preferences":
        return (_messages if name else _prompt_response)(row, kind, chat, where)
    good = _label(row, where)
    if name:
        # Only the last answer has the label.
        dialogue = conversation(row[name], name, where)
        last = [i == len(dialogue.messages) - 1 for i in range(len(dialogue.messages))]
        record: Record = demonstration(Conversation(dialogue.messages, last), name, chat, where)
    else:
        record = _prompt_response(row, "demonstrations", chat, where)
    assert isinstance(record, Demonstration)
    if len(record.learnt) > 1:
        raise DataError(f"{where}: the response must be one assistant message, because the label is of one reply")
    return Labelled(record.prompt, record.response, good)


def _label(row: Row, where: str) -> bool:
    name = _first(row, LABEL_FIELDS)
    if name is None:
        raise DataError(f"{where}: field {LABEL_FIELDS[0]!r} is missing; the record has {_has(row)}")
    if not isinstance(row[name], bool):
        raise DataError(f"{where}: field {name!r} must be true (a good response) or false, not {type_name(row[name])}")
    return bool(row[name])


def _text(row: Row, kind: DataKind, chat: ChatFormat, where: str) -> Record:
    text = _filled(_string(row, _need(row, ("text",), where), where), "text", where)
    if kind == "prompts":
        return Prompt(text, _others(row, "text"))
    cut = text.rfind(ASSISTANT)
    cut = 0 if cut < 0 else cut + len(ASSISTANT)
    return Demonstration.of(text[:cut], text[cut:])


def _messages(row: Row, kind: DataKind, chat: ChatFormat, where: str) -> Record:
    name = _need(row, MESSAGE_FIELDS, where)
    dialogue = conversation(row[name], name, where)
    if kind == "prompts":
        return Prompt(chat.prompt(_asked(dialogue, name, where)), _others(row, name))
    return demonstration(dialogue, name, chat, where)


def _is_messages(row: Row) -> bool:
    """Whether a row is a whole conversation. In LLaMA-Factory's rows it may lack the answer. A label judges the last
    answer, which SFT must not learn if it is false."""
    judged = isinstance(row.get("chosen"), Mapping) or any(isinstance(row.get(name), bool) for name in LABEL_FIELDS)
    return _first(row, MESSAGE_FIELDS) is not None and not judged


def _asked(dialogue: Conversation, name: str, where: str) -> list[Message]:
    """The messages up to the last one that is not the assistant's."""
    messages = list(dialogue.messages)
    while messages and messages[-1]["role"] in ASSISTANTS:
        messages.pop()
    if not messages:
        raise DataError(f"{where}: field {name!r} holds no user message to answer")
    return messages


def _chosen_rejected(row: Row, kind: DataKind, chat: ChatFormat, where: str) -> Record:
    for name in ("chosen", "rejected"):
        if name not in row:
            raise DataError(f"{where}: field {name!r} is missing; the record has {_has(row)}")
    asked = _first(row, PROMPT_FIELDS)
    given = asked or _first(row, MESSAGE_FIELDS) or "prompt"
    fields = _others(row, given, "chosen", "rejected")
    if any(isinstance(value, list | Mapping) for value in (row.get(given), row["chosen"], row["rejected"])):
        return _from_pair(kind, *_message_pair(row, chat, where), fields)
    chosen, rejected = _string(row, "chosen", where), _string(row, "rejected", where)
    if asked is not None:
        prompt = _prompt_text(row, asked, where)
        chosen, rejected = _without_prompt(prompt, chosen, rejected)
        return _from_pair(kind, prompt, chosen, rejected, fields)
    common = _common(chosen, rejected)
    cut = max(common.rfind(" "), common.rfind("\n"))
    cut = 0 if cut < 0 else cut
    if kind == "prompts" and not common[:cut].strip():
        raise DataError(f"{where}: chosen and rejected have no common beginning to use as prompt; add a field 'prompt'")
    return _from_pair(kind, chosen[:cut], chosen[cut:], rejected[cut:], fields)


def _without_prompt(prompt: str, chosen: str, rejected: str) -> tuple[str, str]:
    """The replies without the prompt, which some data sets repeat at the start of both."""
    if chosen.startswith(prompt) and rejected.startswith(prompt):
        return chosen[len(prompt) :], rejected[len(prompt) :]
    return chosen, rejected


def _message_pair(row: Row, chat: ChatFormat, where: str) -> tuple[str, str, str]:
    """Conversational preferences: two lists of messages that differ only in the last one. There may be a list with the
    prompt, which some data sets repeat at the start of both. A reply may also be one message, or its text."""
    chosen, rejected = (conversation(_reply(row[name]), name, where).messages for name in ("chosen", "rejected"))
    asked = _first(row, PROMPT_FIELDS)
    if asked is None and len(chosen) == 1:
        asked = _first(row, MESSAGE_FIELDS)
    before: list[Message] = []
    if asked is not None and isinstance(row[asked], list):
        before = conversation(row[asked], asked, where).messages
    elif asked is not None and isinstance(row[asked], str) and len(chosen) == 1:
        before = [{"role": "user", "content": _prompt_text(row, asked, where)}]
    if chosen[: len(before)] == before == rejected[: len(before)]:
        before = []
    before = before + chosen[:-1]
    last = [messages[-1] for messages in (chosen, rejected) if messages and messages[-1]["role"] in ASSISTANTS]
    if not before or before[-1]["role"] in ASSISTANTS or len(last) < 2 or chosen[:-1] != rejected[:-1]:
        raise DataError(f"{where}: chosen and rejected must be one assistant message each after a common dialogue")
    (better, of_better), (worse, of_worse) = (chat.conversation([*before, m], [len(before)]) for m in last)
    cut = min(of_better[0][0], of_worse[0][0])
    if better[:cut] != worse[:cut]:
        raise DataError(f"{where}: the tokenizer's chat template writes other dialogues before chosen and rejected")
    return like(better, better[:cut]), better[cut:], worse[cut:]


def _reply(value: Any) -> Any:
    """The messages of one side of a pair."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return [value] if isinstance(value, Mapping) else value


# The fields of a completion's score. The second decides between equal ones.
_SCORES = ("overall_score", "score", "fine-grained_score")


def _ranked(row: Row, where: str) -> list[tuple[list[float], str]]:
    """The scores and texts of the row's completions, the best first."""
    found = []
    completions = row[_need(row, ("completions",), where)]
    if not isinstance(completions, list):
        raise DataError(f"{where}: field 'completions' must be a list, not {type_name(completions)}")
    for i, item in enumerate(completions):
        text = item.get("response", item.get("text")) if isinstance(item, Mapping) else None
        scores = [item.get(name) for name in _SCORES] if isinstance(item, Mapping) else []
        numbers = (score for score in scores if isinstance(score, int | float) and not isinstance(score, bool))
        known = [float(number) for number in numbers if abs(number) < 1e300]  # NaN is no score
        if not isinstance(text, str) or not known:
            raise DataError(
                f"{where}: completion {i} needs 'response', a text, and {_SCORES[0]!r} or 'score', a number"
            )
        found.append((known, text))
    return sorted(found, key=lambda each: each[0], reverse=True)


def _no_pair(row: Row, where: str) -> bool:
    """Whether the row's completions tell no better reply from a worse one."""
    ranked = _ranked(row, where)
    return len(ranked) < 2 or ranked[0][0] == ranked[-1][0]


def _completions(row: Row, kind: DataKind, chat: ChatFormat, where: str) -> Record:
    """The best completion of a prompt, and the worst one."""
    others = _others(row, "completions")
    if kind == "prompts":
        return _prompt_response(row, kind, chat, where)
    ranked = _ranked(row, where)
    if kind == "demonstrations" and ranked:
        return _prompt_response({**others, RESPONSE_FIELDS[0]: ranked[0][1]}, kind, chat, where)
    if _no_pair(row, where):
        raise DataError(f"{where}: no two completions have different scores; leave the record out")
    return _chosen_rejected({**others, "chosen": ranked[0][1], "rejected": ranked[-1][1]}, kind, chat, where)


def _is_hh(row: Row) -> bool:
    texts = (row.get("chosen"), row.get("rejected"))
    return "prompt" not in row and all(isinstance(text, str) and ASSISTANT in text for text in texts)


def _read_hh(row: Row, kind: DataKind, chat: ChatFormat, where: str) -> Record:
    return _from_pair(kind, *_hh(row, where))


def _hh(row: Row, where: str) -> tuple[str, str, str]:
    """Prompt, chosen reply and rejected reply. The prompt is the common dialogue up to its last "\\n\\nAssistant:"."""
    chosen = _string(row, _need(row, ("chosen",), where), where)
    rejected = _string(row, _need(row, ("rejected",), where), where)
    cut = _common(chosen, rejected).rfind(ASSISTANT)
    if cut < 0:
        raise DataError(
            f"{where}: chosen and rejected have no common dialogue up to an 'Assistant:' turn, as format HH needs"
        )
    cut += len(ASSISTANT)
    return chosen[:cut], chosen[cut:], rejected[cut:]


def _common(a: str, b: str) -> str:
    """The longest common beginning of two texts."""
    end = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:end]


def _from_pair(kind: DataKind, prompt: str, chosen: str, rejected: str, fields: dict[str, Any] | None = None) -> Record:
    if kind == "preferences":
        return Preference(prompt, chosen, rejected)
    return Demonstration.of(prompt, chosen) if kind == "demonstrations" else Prompt(prompt, fields or {})


def _others(row: Row, *names: str) -> dict[str, Any]:
    """The fields that are not in `names`. Reward functions get them."""
    return {name: value for name, value in row.items() if name not in names}


def _first(row: Row, names: Sequence[str]) -> str | None:
    return next((n for n in names if row.get(n) is not None), None)


def _need(row: Row, names: Sequence[str], where: str) -> str:
    name = _first(row, names)
    if name is None:
        empty = next((n for n in names if n in row), None)
        if empty is not None:
            raise DataError(f"{where}: field {empty!r} is null; write a value, or leave the record out")
        wanted = f"field {names[0]!r}" + (f" (or {', '.join(names[1:])})" if len(names) > 1 else "")
        raise DataError(f"{where}: {wanted} is missing; the record has {_has(row)}")
    return name


def _string(row: Row, name: str, where: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise DataError(f"{where}: field {name!r} must be a string, not {type_name(value)}")
    return value


def _filled(text: str, name: str, where: str) -> str:
    if not text:
        raise DataError(f"{where}: field {name!r} is an empty string")
    return text


def _has(row: Row) -> str:
    names = [repr(n) for n in row]
    return ("fields " if len(names) > 1 else "only ") + ", ".join(names[:12]) if names else "no fields"


# The formats by the names of `DataSource.format`, in the order in which `detect` tries them.
FORMATS: dict[str, RowFormat] = {
    each.name: each
    for each in (
        RowFormat("Messages", _is_messages, _messages),
        RowFormat("HH", _is_hh, _read_hh, judged=True),
        RowFormat("ChosenRejected", lambda row: "chosen" in row and "rejected" in row, _chosen_rejected, judged=True),
        RowFormat(
            "Labelled",
            lambda row: (
                isinstance(row.get(_first(row, LABEL_FIELDS) or ""), bool)
                and (
                    _first(row, MESSAGE_FIELDS) is not None
                    or (_first(row, PROMPT_FIELDS) is not None and _first(row, RESPONSE_FIELDS) is not None)
                )
            ),
            _labelled,
            judged=True,
        ),
        RowFormat(
            "Completions",
            lambda row: isinstance(row.get("completions"), list) and _first(row, PROMPT_FIELDS) is not None,
            _completions,
            judged=True,
            no_pair=_no_pair,
        ),
        RowFormat("PromptResponse", lambda row: _first(row, PROMPT_FIELDS) is not None, _prompt_response),
        RowFormat("Text", lambda row: "text" in row, _text),
    )
}
