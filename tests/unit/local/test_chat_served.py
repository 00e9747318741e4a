"""Talking through an OpenAI-compatible server."""

import io

import pytest
from click.testing import CliRunner
from rich.console import Console

from dovetail.cli.main import cli
from dovetail.coordinator.data.text.chat_template import HUMAN_ASSISTANT_TEMPLATE
from dovetail.protocol.errors import RunError
from dovetail.tools.serving.chat import Sampling
from dovetail.tools.serving.chat_server import ServedModel
from dovetail.tools.serving.conversation import ColumnScreen, PlainScreen, converse, typed_lines
from dovetail.tools.serving.served_result import has_own_template
from helpers.fake_openai import FakeOpenAI
from helpers.patience import PATIENCE

SAMPLING = Sampling(8, 0.5)


def talk(server: FakeOpenAI, *lines: str, **options):
    """The text that a person sees."""
    written: list[str] = []
    model = ServedModel(server.url, key=server.key or None, stop=options.pop("stop", ()))
    try:
        write = options.pop("write", written.append)
        converse({server.model: model}, iter(lines), write, SAMPLING, PlainScreen(write), **options)
    finally:
        model.close()
    return "".join(written)


def test_the_whole_dialogue_is_sent_each_time_and_replies_are_streamed():
    with FakeOpenAI(key="k").running() as server:
        text = talk(server, "one", "/system be brief", "two", "/reset", "three", system="be kind", stop=["\n\nHuman:"])
    assert text == (
        "actor heard one\n(the system prompt is set)\nactor heard two\n(the dialogue starts anew)\nactor heard three\n"
    )
    first, second, third = server.asked
    assert first["messages"] == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "one"}]
    assert [m["content"] for m in second["messages"]] == ["be brief", "one", "actor heard one", "two"]
    assert [m["content"] for m in third["messages"]] == ["be brief", "three"]
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("actor", 8, 0.5)
    assert first["stop"] == ["\n\nHuman:"]


def test_ctrl_c_stops_a_reply_and_the_dialogue_goes_on():
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if written.count(" more") == 3 and server.endless:
            server.endless = False
            raise KeyboardInterrupt

    with FakeOpenAI(endless=True).running() as server:
        talk(server, "one", "two", write=write)
        assert server.asked[1]["messages"][1]["content"] == "actor heard one more more more"
    assert "\n(stopped)\n" in written


def test_closing_a_reply_hangs_up():
    with FakeOpenAI(endless=True).running() as server:
        model = ServedModel(server.url)
        reply = model.reply([{"role": "user", "content": "one"}], SAMPLING)
        assert next(reply) == " "
        reply.close()
        assert server.hung_up.wait(PATIENCE)
        model.close()


def test_a_dialogue_that_is_too_long_loses_its_first_turns():
    with FakeOpenAI(most_turns=3).running() as server:
        text = talk(server, "one", "two", "three")
    assert "its first turn is forgotten" in text
    assert [m["content"] for m in server.asked[-1]["messages"]] == ["two", "actor heard two", "three"]


def test_a_failed_reply_is_a_sentence_for_a_person_and_an_error_for_a_pipe():
    told: list[str] = []
    with FakeOpenAI(most_turns=0).running() as server:
        talk(server, "one", "two", tell=lambda error: told.append(str(error)))
        assert [m["content"] for m in server.asked[-1]["messages"]] == ["two"]
        with pytest.raises(RunError, match="maximum context length"):
            talk(server, "one")
    assert len(told) == 2
    assert "too long for the model" in told[0]


def test_a_server_that_is_not_there_or_has_another_model_or_key():
    with pytest.raises(RunError, match=r"no server answers at http://127\.0\.0\.1:9"):
        ServedModel("http://127.0.0.1:9")
    with FakeOpenAI(key="k").running() as server:
        with pytest.raises(RunError, match="set OPENAI_API_KEY"):
            ServedModel(server.url)
        with pytest.raises(RunError, match="has no model 'sft'; it has: actor"):
            ServedModel(f"{server.url}/v1", "sft", "k")


def test_two_models_side_by_side():
    out = io.StringIO()
    screen = ColumnScreen(Console(file=out, width=80, force_terminal=True, legacy_windows=False))
    with FakeOpenAI("sft").running() as one, FakeOpenAI("actor").running() as two:
        models = {"sft": ServedModel(one.url), "actor": ServedModel(two.url)}
        converse(models, iter(["hello", "again"]), out.write, SAMPLING, screen)
        assert [m["content"] for m in one.asked[1]["messages"]] == ["hello", "sft heard hello", "again"]
        assert [m["content"] for m in two.asked[1]["messages"]] == ["hello", "actor heard hello", "again"]
        for model in models.values():
            model.close()
    last = [line for line in out.getvalue().splitlines() if "sft heard again" in line][-1]
    assert "actor heard again" in last


def test_a_line_that_is_being_typed_is_dropped_by_ctrl_c():
    typed = iter(["one", KeyboardInterrupt, "two", EOFError])

    def read() -> str:
        found = next(typed)
        if isinstance(found, str):
            return found
        raise found

    written: list[str] = []
    assert list(typed_lines(read, written.append)) == ["one", "two"]
    assert any("/quit ends the chat" in text for text in written)


def test_the_command_compares_piped_lines(tmp_path):
    for name in ("sft", "actor"):
        (tmp_path / "models" / name).mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            (tmp_path / "models" / name / file).write_text("{}")
    with FakeOpenAI("sft").running() as one, FakeOpenAI("actor").running() as two:
        urls = ["--url", one.url, "--url", two.url]
        found = CliRunner().invoke(cli, ["chat", str(tmp_path), "--compare", "sft", "actor", *urls], input="hi\n")
        assert found.output == "sft: sft heard hi\nactor: actor heard hi\n"
        alone = CliRunner().invoke(cli, ["chat", "--url", two.url], input="hi\n")
        assert alone.output == "actor heard hi\n"
        # The models' tokenizers have no chat template, so their replies end where the next turn would begin.
        assert two.asked[0]["stop"] == ["\n\nHuman:", "\n\nAssistant:"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name the folder of a run"),
        (["runs/x", "--compare", "sft", "actor", "--url", "http://a"], "give --url 2 times"),
        (["runs/x", "--engine", "vllm", "--url", "http://a"], "give one of them"),
        (["--iteration", "3", "--url", "http://a"], "--iteration is of a run; name its folder"),
    ],
)
def test_arguments_that_do_not_fit(arguments, said):
    found = CliRunner().invoke(cli, ["chat", *arguments])
    assert found.exit_code == 2
    assert said in found.output


# What the release before wrote into exports of models without a template of their own.
EARLIER_TEMPLATE = (
    "{{- '<s>' }}{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{- '\\n\\nHuman: ' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' %}{{- '\\n\\nAssistant: ' + message['content'] }}"
    "{%- elif message['role'] == 'system' %}{{- '\\n\\nSystem: ' + message['content'] }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '\\n\\nAssistant:' }}{%- endif %}"
)


def test_replies_of_models_without_a_template_end_where_the_user_would_speak(tmp_path):
    """Also of a model that an earlier release exported: else it goes on with the user's next turn."""
    for text, own in ((HUMAN_ASSISTANT_TEMPLATE, False), (EARLIER_TEMPLATE, False), ("{{ messages }}", True)):
        (tmp_path / "chat_template.jinja").write_text(text)
        assert has_own_template(tmp_path) is own
