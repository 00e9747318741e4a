"""Conversations: which turns are learnt, in which text, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.formats import convert, detect
from dovetail.coordinator.data.records import Demonstration, Labelled, Preference, Prompt
from dovetail.coordinator.data.sources import load, with_system
from dovetail.coordinator.data.text import tokenizer
from dovetail.coordinator.data.text.chat_template import ChatFormat, HumanAssistant, Template
from dovetail.coordinator.data.text.conversations import conversation
from dovetail.manifest.fixed_names import DATA_KINDS, DataKind
from dovetail.manifest.types import DataSource

END = "<|im_end|>"


class ChatML:
    """A tokenizer with the template of Qwen and others. `thinks`: it writes a thought before the last answer, and takes
    thoughts out of earlier ones."""

    eos_token, bos_token = END, None

    def __init__(self, thinks: bool = False) -> None:
        self._thinks = thinks

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool = False
    ) -> str:
        text = ""
        for i, message in enumerate(messages):
            content = message["content"]
            if self._thinks and message["role"] == "assistant":
                content = content.split("</think>\n")[-1]
                if i == len(messages) - 1:
                    content = "<think>\n\n</think>\n\n" + content
            text += f"<|im_start|>{message['role']}\n{content}{END}\n"
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def say(role: str, content: str, **marks: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **marks}


LONG = [say("user", "Hi"), say("assistant", "Hello!"), say("user", "Sum?"), say("assistant", "4")]
CHATML, THINKS, PLAIN = Template(ChatML()), Template(ChatML(thinks=True)), HumanAssistant()


def read(row: dict[str, Any], kind: DataKind = "demonstrations", chat: ChatFormat = CHATML) -> Any:
    return convert(row, detect(row, "f:1", kind), kind, chat, "f:1")


def responses(record: Demonstration) -> list[str]:
    return [text for text, learnt in record.parts() if learnt]


def test_every_assistant_turn_is_learnt_with_what_closes_it() -> None:
    record = read({"messages": LONG})
    first = f"<|im_start|>user\nHi{END}\n<|im_start|>assistant\n"
    between = f"\n<|im_start|>user\nSum?{END}\n<|im_start|>assistant\n"
    assert record.prompt == first
    assert list(record.parts()) == [(f"Hello!{END}", True), (between, False), (f"4{END}", True)]
    whole = ChatML().apply_chat_template(LONG, tokenize=False)
    assert record.text == whole.rstrip(), "the line break after the end token is not the model's"
    plain = read({"messages": LONG}, chat=PLAIN)
    assert plain.prompt == "\n\nHuman: Hi\n\nAssistant:"
    assert list(plain.parts()) == [(" Hello!", True), ("\n\nHuman: Sum?\n\nAssistant:", False), (" 4", True)]


@pytest.mark.parametrize("mark", [{"train": False}, {"weight": 0}])
def test_marked_turns_are_given(mark: dict[str, Any]) -> None:
    first = [LONG[0], {**LONG[1], **mark}, *LONG[2:]]
    only_last = read({"messages": first})
    assert list(only_last.parts()) == [(f"4{END}", True)]
    assert "Hello!" in only_last.prompt
    last = [*LONG[:3], {**LONG[3], **mark}]
    assert read({"messages": last}) == read({"messages": LONG[:2]}), "what nothing learns from is left out"


def test_a_template_that_thinks_before_the_last_answer_alone() -> None:
    """As Qwen3's: an earlier turn is in the conversation without the empty thought."""
    record = read({"messages": LONG}, chat=THINKS)
    assert responses(record) == [f"Hello!{END}", f"<think>\n\n</think>\n\n4{END}"]
    thought = [LONG[0], say("assistant", "<think>greet</think>\nHello!"), *LONG[2:]]
    with pytest.raises(DataError, match=r"message 1 is not in the text .* \"train\": false"):
        read({"messages": thought}, chat=THINKS)
    thought[1]["train"] = False
    assert len(responses(read({"messages": thought}, chat=THINKS))) == 1


def test_a_system_prompt_opens_conversations_without_one(tmp_path: Path) -> None:
    chat = with_system(CHATML, DataSource(path="x", systemPrompt="Be kind."))
    opened = read({"messages": LONG}, chat=chat)
    assert opened.prompt.startswith(f"<|im_start|>system\nBe kind.{END}\n<|im_start|>user\nHi")
    assert list(opened.parts()) == list(read({"messages": LONG}).parts())
    own = [say("system", "Be rude."), *LONG]
    assert read({"messages": own}, chat=chat) == read({"messages": own})
    pair = {"chosen": LONG[:2], "rejected": [LONG[0], say("assistant", "Go.")]}
    assert read(pair, "preferences", chat).prompt == opened.prompt
    assert read({"messages": LONG}, "prompts", chat).prompt.startswith("<|im_start|>system\nBe kind.")
    (tmp_path / "texts.jsonl").write_text(json.dumps({"prompt": "1+1="}) + "\n")
    source = DataSource(path="texts.jsonl", systemPrompt="Be kind.")
    with pytest.raises(DataError, match=r"texts.jsonl:1: a system prompt opens conversations, but this record is no"):
        load(source, "prompts", field="f", base_dir=tmp_path, cache_dir=tmp_path, seed=0)


def test_a_records_own_system_prompt_opens_it() -> None:
    """As in ShareGPT's records, which other trainers read."""
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]
    row = {"conversations": turns, "system": "Be brief."}
    wanted = read({"messages": [say("system", "Be brief."), *LONG[:2]]})
    assert read(row) == wanted
    source = with_system(CHATML, DataSource(path="x", systemPrompt="Be kind."))
    assert read(row, chat=source) == wanted
    for nothing in (None, "", 3):
        assert read({**row, "system": nothing}) == read({"messages": LONG[:2]})
    prompt = read(row, "prompts")
    assert prompt == Prompt(wanted.prompt, {"system": "Be brief."})
    own = {"messages": [say("system", "Be rude."), *LONG[:2]], "system": "Be brief."}
    assert "Be rude." in read(own).prompt
    assert "brief" not in read(own).prompt


def test_a_prompt_of_messages_and_what_follows() -> None:
    row = {"prompt": LONG[:1], "completion": LONG[1:], "gold": 4}
    assert read(row) == read({"messages": LONG})
    assert read(row, "prompts") == Prompt(read({"messages": LONG}).prompt, {"completion": LONG[1:], "gold": 4})
    assert responses(read({"prompt": LONG[:3], "completion": LONG[3:]})) == [f"4{END}"], "the prompt is not learnt"
    assert read({"prompt": LONG[:3], "completion": "4"}) == read({"prompt": LONG[:3], "completion": LONG[3:]})


def test_pairs_share_all_but_the_last_message() -> None:
    other = say("assistant", "5")
    wanted = read({"chosen": LONG, "rejected": [*LONG[:3], other]}, "preferences")
    assert isinstance(wanted, Preference)
    assert (wanted.chosen, wanted.rejected) == (f"4{END}", f"5{END}")
    for given in (1, 3):
        row = {"prompt": LONG[:given], "chosen": LONG[given:], "rejected": [*LONG[given:3], other]}
        assert read(row, "preferences") == wanted
        repeated = {"prompt": LONG[:given], "chosen": LONG, "rejected": [*LONG[:3], other]}
        assert read(repeated, "preferences") == wanted
    apart = {"prompt": LONG[:1], "chosen": LONG[1:], "rejected": [say("assistant", "No."), LONG[2], other]}
    with pytest.raises(DataError, match="must be one assistant message each after a common dialogue"):
        read(apart, "preferences")


def test_one_response_and_a_label() -> None:
    row = {"prompt": "1+1=", "completion": "2", "label": True}
    assert read(row, "preferences", PLAIN) == Labelled("1+1=", "2", True)
    assert read(row, chat=PLAIN) == Demonstration.of("1+1=", "2")
    messages = {"prompt": LONG[:3], "completion": LONG[3:], "label": False}
    found = read(messages, "preferences")
    assert (found.response, found.good) == (f"4{END}", False)
    with pytest.raises(DataError, match="the label is of one reply"):
        read({"prompt": LONG[:1], "completion": LONG[1:], "label": True}, "preferences")
    good, bad = ({"prompt": "a", "completion": "b", "label": label} for label in (True, False))
    assert isinstance(convert(good, "Labelled", "demonstrations", CHATML, "f:1"), Demonstration)
    with pytest.raises(DataError, match="label' is false, so SFT must not learn this response"):
        convert(bad, "Labelled", "demonstrations", CHATML, "f:1")
    with pytest.raises(DataError, match=r"field 'label' must be true \(a good response\) or false, not a number"):
        convert({"prompt": "a", "response": "b", "label": 1}, "Labelled", "preferences", CHATML, "f:1")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([LONG[0], say("assistant", "x", train="no")], "message 1 of field 'messages' has train 'no', but it must be"),
        ([LONG[0], say("assistant", "x", weight=0.5)], "has weight 0.5, but it must be 0 or 1"),
        ([LONG[0], say("assistant", "x", train=False)], "no message of field 'messages' is learnt"),
        (LONG[:3], "the last of field 'messages' must be an assistant message"),
    ],
)
def test_what_cannot_be_learnt_is_named(messages: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(DataError, match=r"^f:1: ") as error:
        read({"messages": messages})
    assert words in str(error.value)


class Refuses(ChatML):
    """A tokenizer whose template refuses system messages, as those of Gemma do."""

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool = False
    ) -> str:
        if messages[0]["role"] == "system":
            raise RuntimeError("System role not supported")  # jinja2 raises an error of its own here
        return super().apply_chat_template(messages, tokenize, add_generation_prompt)


@pytest.mark.parametrize("kind", ["demonstrations", "prompts"])
def test_what_a_template_refuses_is_named_with_its_line(kind: DataKind) -> None:
    system = [say("system", "Be brief."), *LONG]
    said = "f:1: the tokenizer's chat template refuses the conversation: System role not supported"
    with pytest.raises(DataError) as error:
        read({"messages": system}, kind, Template(Refuses()))
    assert str(error.value) == said
    source = DataSource.model_validate({"path": "x.jsonl", "systemPrompt": "Be brief."})
    with pytest.raises(DataError) as error:
        read({"messages": LONG}, kind, with_system(Template(Refuses()), source))
    assert str(error.value) == said


def test_a_message_may_be_a_list_of_texts() -> None:
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]
    found = conversation([{"role": "user", "content": parts}], "messages", "here")
    assert found.messages == [{"role": "user", "content": "2 + 2?"}]
    with pytest.raises(
        DataError, match=r"^here: message 0 of field 'messages' needs 'role' and 'content', both strings$"
    ):
        conversation([{"role": "user", "content": [*parts, {"type": "image"}]}], "messages", "here")


SHAREGPT = [
    {"from": "human", "value": "Rain?"},
    {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Bern"}}'},
    {"from": "observation", "value": "dry"},
    {"from": "gpt", "value": "No."},
]


def test_calls_and_observations_of_sharegpt() -> None:
    found = conversation(SHAREGPT, "conversations", "here")
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
    assert found.messages == [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "dry"},
        {"role": "assistant", "content": "No."},
    ]
    assert found.learnt == [False, True, False, True]
    several = [SHAREGPT[0], {"from": "function_call", "value": '[{"name": "a"}, {"name": "b"}]'}]
    calls = conversation(several, "conversations", "here").messages[1]["tool_calls"]
    assert [each["function"] for each in calls] == [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]
    for text in ("weather(Bern)", "[]", '{"arguments": {}}', "3"):
        with pytest.raises(DataError, match=r"here: message 0 of field 'c' has the role function_call, so its text"):
            conversation([{"from": "function_call", "value": text}], "c", "here")


@pytest.mark.parametrize("name", ["conversations", "messages"])
def test_preferences_of_llama_factory(name: str) -> None:
    """One conversation, and the last message twice as an object. For KTO the whole conversation and a tag."""
    asked = [{"from": "human", "value": "Hi"}]
    pair = {side: {"from": "gpt", "value": side} for side in ("chosen", "rejected")}
    row = {name: asked, **pair, "system": "Be kind."}
    start = "\n\nSystem: Be kind.\n\nHuman: Hi\n\nAssistant:"
    expected = Preference(start, " chosen", " rejected")
    assert read(row, "preferences", HumanAssistant()) == expected
    assert read({**row, **{side: side for side in pair}}, "preferences", HumanAssistant()) == expected
    assert read(row, "demonstrations", HumanAssistant()) == Demonstration.of(start, " chosen")
    assert read(row, "prompts", HumanAssistant()) == Prompt(start, {"system": "Be kind."})
    assert detect(row, "here") == "ChosenRejected"
    talk = [*asked, {"from": "gpt", "value": "Yo."}, *asked, {"from": "gpt", "value": "Hello"}]
    start = "\n\nHuman: Hi\n\nAssistant: Yo.\n\nHuman: Hi\n\nAssistant:"
    for good in (True, False):
        tagged = {name: talk, "kto_tag": good}
        assert read(tagged, "preferences", HumanAssistant()) == Labelled(start, " Hello", good)
        assert read({**tagged, "label": None}, "preferences", HumanAssistant()) == Labelled(start, " Hello", good)
    for label in ("label", "kto_tag"):
        with pytest.raises(DataError, match=f"'{label}' is false, so SFT must not learn this response"):
            read({name: talk, label: False}, "demonstrations", HumanAssistant())
        assert responses(read({name: talk, label: True}, "demonstrations", HumanAssistant())) == [" Yo.", " Hello"]
    with pytest.raises(DataError, match="chosen and rejected must be one assistant message each after a common"):
        read({name: talk, **pair}, "preferences", HumanAssistant())


def test_the_history_of_an_alpaca_record_comes_before_its_instruction() -> None:
    row = {
        "system": "Be kind.",
        "history": [["Hi", "Hello"], ["2 + 2?", "4"]],
        "instruction": "And",
        "input": "3 + 3?",
        "output": "6",
    }
    start = "\n\nSystem: Be kind.\n\nHuman: Hi\n\nAssistant:"
    second, third = "\n\nHuman: 2 + 2?\n\nAssistant:", "\n\nHuman: And\n3 + 3?\n\nAssistant:"
    whole = read(row, "demonstrations", HumanAssistant())
    assert whole.text == f"{start} Hello{second} 4{third} 6"
    assert responses(whole) == [" Hello", " 4", " 6"]
    prompt = f"{start} Hello{second} 4{third}"
    assert read(row, "prompts", HumanAssistant()).prompt == prompt
    pair = {**row, "chosen": "6", "rejected": "7"}
    assert read(pair, "preferences", HumanAssistant()) == Preference(prompt, " 6", " 7")
    for name in ("history", "system"):
        with pytest.raises(DataError, match=f"f:1: template is Never, but this record has the field '{name}'"):
            convert(
                {"instruction": "Add", "output": "6", name: row[name]},
                "PromptResponse",
                "prompts",
                CHATML,
                "f:1",
                "Never",
            )
    for wrong in (["a", None], ["a"], "a"):
        with pytest.raises(DataError, match=r"item 1 of field 'history' must be a pair of texts, question and answer"):
            read({**row, "history": [["Hi", "Hello"], wrong]}, "demonstrations", HumanAssistant())
    other = {"instruction": "Tell", "history": "of Rome", "output": "x"}
    assert read(other, "demonstrations", HumanAssistant()) == Demonstration.of("Tell", "x")


def scored(*scores: Any) -> dict[str, Any]:
    """A row as those of openbmb/UltraFeedback."""
    completions = [{"model": "m", "response": f"r{i}", "overall_score": score} for i, score in enumerate(scores)]
    return {"source": "x", "instruction": "Hi", "models": ["m"], "completions": completions}


def test_completions_with_scores() -> None:
    chat = HumanAssistant()
    assert read(scored(5, 7.5, 2, 3), "preferences", chat) == Preference("Hi", "r1", "r2")
    assert read(scored(5, 7.5), "demonstrations", chat) == Demonstration.of("Hi", "r1")
    assert read(scored(5, 7.5), "prompts", chat).prompt == "Hi"
    even = scored(5, 5)
    even["completions"][1]["fine-grained_score"] = 4.0
    even["completions"][0]["fine-grained_score"] = 3.0
    assert read(even, "preferences", chat) == Preference("Hi", "r1", "r0")
    for row in (scored(5, 5), scored(5), scored()):
        with pytest.raises(DataError, match="f:1: no two completions have different scores"):
            read(row, "preferences", chat)
    for none in (None, float("nan"), True):
        with pytest.raises(DataError, match="f:1: completion 1 needs 'response', a text, and 'overall_score' or"):
            read(scored(5, none), "preferences", chat)


def test_rows_without_a_better_completion_are_left_out(tmp_path: Path) -> None:
    import datasets

    rows = [scored(5, 7), scored(4, 4), scored(1, 2), scored(3)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    for name in ("a.json", "a.parquet"):
        source = DataSource.model_validate({"path": name})
        options: dict[str, Any] = {"field": "f", "base_dir": tmp_path, "cache_dir": tmp_path / "cache", "seed": 0}
        found = load(source, "preferences", **options)
        assert [found[i] for i in range(len(found))] == [Preference("Hi", "r1", "r0")] * 2
        assert len(load(source, "prompts", **options)) == 4
    (tmp_path / "a.json").write_text(json.dumps([scored(4, 4)]))
    with pytest.raises(DataError, match=r"a.json: no record has two completions with different scores"):
        load(DataSource.model_validate({"path": "a.json"}), "preferences", **options)


USER, ANSWER = f"<|im_start|>user\n%s{END}\n<|im_start|>assistant\n", f"%s{END}"


def chat_text(asked: str, answer: str) -> Demonstration:
    prompt, reply = USER % asked, ANSWER % answer
    return Demonstration(prompt + reply, ((len(prompt), len(prompt + reply)),))


@pytest.mark.parametrize(
    ("row", "asked", "answer"),
    [
        ({"question": "2 + 2?", "answer": "4"}, "2 + 2?", "4"),
        ({"prompt": "2 + 2?", "response": "4"}, "2 + 2?", "4"),
        ({"instruction": "Add", "input": "2 and 2", "output": "4"}, "Add\n2 and 2", "4"),
        ({"prompt": "2 + 2?", "completion": "4", "label": True}, "2 + 2?", "4"),
        (scored(1, 2), "Hi", "r1"),
    ],
)
def test_an_instruction_is_written_with_the_tokenizers_template(row: Any, asked: str, answer: str) -> None:
    """A chat model was trained on raw text."""
    assert read(row) == chat_text(asked, answer)
    assert read(row, "prompts").prompt == USER % asked
    assert convert(row, detect(row, "f:1"), "demonstrations", CHATML, "f:1", "Always") == chat_text(asked, answer)
    plain = convert(row, detect(row, "f:1"), "demonstrations", CHATML, "f:1", "Never")
    assert plain == Demonstration.of(asked, answer) == read(row, chat=HumanAssistant())


def test_the_texts_of_preferences_are_written_with_the_template() -> None:
    pair = Preference(USER % "2 + 2?", ANSWER % "4", ANSWER % "5")
    for row in (
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
        {"question": "2 + 2?", "chosen": "2 + 2? 4", "rejected": "2 + 2? 5"},
    ):
        assert read(row, "preferences") == pair
    label = {"prompt": "2 + 2?", "completion": "4", "label": False}
    assert read(label, "preferences") == Labelled(pair.prompt, pair.chosen, False)
    never = convert(row, "ChosenRejected", "preferences", CHATML, "f:1", "Never")
    assert never == Preference("2 + 2?", " 4", " 5")


def test_a_prompts_other_fields_go_to_reward_functions_as_before() -> None:
    row = {"question": "2 + 2?", "answer": "4", "level": 3}
    assert read(row, "prompts").fields == {"answer": "4", "level": 3}


def test_system_messages_of_records_and_sources_open_instructions() -> None:
    row = {"question": "2 + 2?", "answer": "4"}
    start = f"<|im_start|>system\nBe brief.{END}\n"
    source = DataSource.model_validate({"path": "x.jsonl", "systemPrompt": "Be brief."})
    assert read(row, "prompts", with_system(CHATML, source)).prompt == start + USER % "2 + 2?"
    assert read({**row, "system": "Be brief."}, "prompts").prompt == start + USER % "2 + 2?"
    human = "\n\nSystem: Be brief.\n\nHuman: 2 + 2?\n\nAssistant:"
    assert read({**row, "system": "Be brief."}, "prompts", HumanAssistant()).prompt == human


def test_texts_that_are_no_instructions_stay() -> None:
    assert read({"text": "Words."}) == Demonstration("Words.", ((0, 6),))
    dialogue = {"chosen": "\n\nHuman: Hi\n\nAssistant: a", "rejected": "\n\nHuman: Hi\n\nAssistant: b"}
    assert read(dialogue, "preferences").prompt == "\n\nHuman: Hi\n\nAssistant:"
    for row, name in (({"text": "Words."}, "'text'"), (dialogue, "'chosen', 'rejected'")):
        with pytest.raises(DataError, match=f"f:1: template is Always, but this record has .*{name} and no prompt"):
            convert(row, detect(row, "f:1"), "demonstrations", CHATML, "f:1", "Always")
    with pytest.raises(DataError, match="f:1: template is Always, but the tokenizer has no chat template"):
        convert({"prompt": "a"}, "PromptResponse", "prompts", HumanAssistant(), "f:1", "Always")


def test_a_prompt_that_is_written_with_the_template_already_is_named() -> None:
    """It would be written twice."""
    row = {"prompt": USER % "2 + 2?", "response": "4"}
    with pytest.raises(DataError, match=r"f:1: the prompt is written with .* already, for it ends with '<\|im_s"):
        read(row)
    assert convert(row, "PromptResponse", "prompts", CHATML, "f:1", "Never").prompt == row["prompt"]
    assert convert(row, "PromptResponse", "prompts", CHATML, "f:1", "Always").prompt == USER % row["prompt"]


def test_a_developer_is_the_system_where_the_template_knows_none(tmp_path: Path) -> None:
    talk = [say("developer", "Be brief."), say("user", "2 + 2?"), say("assistant", "4")]
    as_system = [say("system", "Be brief."), *talk[1:]]
    for chat in (CHATML, HumanAssistant()):
        for kind in DATA_KINDS[::2]:
            assert read({"messages": talk}, kind, chat) == read({"messages": as_system}, kind, chat)
    source = DataSource.model_validate({"path": "x.jsonl", "systemPrompt": "Be long."})
    assert "Be long." not in read({"messages": talk}, "prompts", with_system(CHATML, source)).prompt
    made = tokenizer.train(["a"], 258)
    made.chat_template = (
        "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}<{{ m.role }}>{{ m.content }}"
    )
    made.chat_template += "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    prompt = read({"messages": talk}, "prompts", Template(made)).prompt
    assert prompt == "D<developer>Be brief.<user>2 + 2?<assistant>"


def test_the_prompt_beside_whole_conversations_is_not_written_twice() -> None:
    """Rows as those of HuggingFaceH4/ultrafeedback_binarized. The two may differ by white space."""
    for prompt in ("2 + 2?", " 2 + 2? "):
        row = {"prompt": prompt, "messages": [say("user", "2 + 2?"), say("assistant", "4")], "score_chosen": 8.0}
        row |= {
            side: [say("user", "2 + 2?"), say("assistant", text)] for side, text in (("chosen", "4"), ("rejected", "5"))
        }
        assert read(row, "preferences") == Preference(USER % "2 + 2?", ANSWER % "4", ANSWER % "5")
        assert read(row) == chat_text("2 + 2?", "4")


def test_an_answer_that_is_no_text_is_named() -> None:
    with pytest.raises(DataError, match="f:1: field 'answer' must be a string, not a number"):
        read({"question": "2 + 2?", "answer": 4})


def test_a_list_of_records_in_an_object_is_named() -> None:
    with pytest.raises(DataError, match="; if 'data' holds the records, write this list alone into the file"):
        detect({"version": 1, "data": [{"question": "2 + 2?"}]}, "f")
