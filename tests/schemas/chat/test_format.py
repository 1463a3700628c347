import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers

from tests.schemas.chat.families import FAMILIES, PROSE, TOOLS, ModelFamily, odd_ids, prose
from tidemill.schemas.chat.contexts import Contexts
from tidemill.schemas.chat.format import ChatFormat, chatml, load_chat_format, special_texts
from tidemill.schemas.chat.messages import NO_TOOLS, Message
from tidemill.schemas.chat.template import ChatTemplate, TemplateRefused
from tidemill.schemas.config import ChatSettings

each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
USER: Message = {"role": "user", "content": "How much is it?"}
TURNS = 200


# Sampled ids


def played(family: ModelFamily, draw: random.Random) -> tuple[int, int]:
    """Turns of conversations that were sampled, and those whose ids a rendering of the messages does not have."""
    chat = family.chat()
    sampled = lost = 0
    while sampled < TURNS:
        contexts = Contexts[list[int]](chat)
        messages: list[Message] = [{"role": "user", "content": prose(draw)}]
        for _ in range(5):
            asked = contexts.begin(messages, TOOLS)
            text = (prose(draw, 40) if draw.random() < 0.6 else "") or family.call
            ids = odd_ids(draw, chat, text)
            if draw.random() < 0.25:
                ids = ids[: draw.randrange(1, len(ids) + 1)]  # cut off
            else:
                ids.append(draw.choice(chat.stop_token_ids))
            read = chat.read(ids, TOOLS, asked.context.count)
            before = list(asked.context.ids)
            contexts.add_turn(asked, ids, read.message, ids)
            context = asked.context
            assert context.ids[: len(before)] == before
            messages.append(read.message)
            calls = read.message.get("tool_calls", ())
            messages += [{"role": "tool", "content": "3", "tool_call_id": call["id"]} for call in calls]
            messages += [] if calls else [{"role": "user", "content": prose(draw)}]
        (context,) = contexts.all
        assert [context.ids[turn.start : turn.end] for turn in context.turns] == [turn.made for turn in context.turns]
        again = _text(chat.open(messages, TOOLS))
        for turn in context.turns:
            sampled += 1
            lost += _text(turn.made) not in again
    return sampled, lost


def _text(ids: list[int]) -> str:
    return "".join(f" {token}," for token in ids)


@each_family
def test_a_context_keeps_every_sampled_id_where_a_rendering_would_lose_many(family: ModelFamily):
    sampled, lost = played(family, random.Random(6))
    assert sampled >= TURNS
    assert lost > sampled / 10


@each_family
def test_a_cut_off_turn_gets_its_end_and_one_that_ended_gets_no_second(family: ModelFamily):
    chat = family.chat()
    said: Message = {"role": "assistant", "content": "This much"}
    for stop in chat.stop_token_ids:
        close, rest = chat.template.extension([USER], said, [USER])
        more = chat.extend(stop, [USER], said, [USER])
        assert more == chat.encode(rest if chat.token(stop) == close else close + rest)
    assert chat.extend(chat.encode("a")[0], [USER], said, [USER]) == chat.encode(close + rest)


def test_an_extension_is_written_as_it_would_be_within_the_whole_text():
    # A token that absorbs the white space after it, as Phi-3's do, must absorb it here as well.
    tokenizer = FAMILIES["smollm2"].tokenizer()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True, rstrip=True, normalized=False)])
    source = FAMILIES["smollm2"].source
    chat = ChatFormat(tokenizer, ChatTemplate(source, {}, special_texts(tokenizer), ChatSettings()), [])
    said: Message = {"role": "assistant", "content": "This much."}
    whole = chat.open([USER, said, USER])
    end = tokenizer.token_to_id("<|im_end|>")
    more = chat.extend(end, [USER], said, [USER])
    assert whole[-len(more) - 1 :] == [end, *more]
    assert not tokenizer.decode(more, skip_special_tokens=False).startswith("\n")


@each_family
def test_an_opening_that_was_rendered_before_has_the_same_ids(family: ModelFamily):
    chat = family.chat()
    first = chat.open([USER], TOOLS)
    first.append(0)  # a caller's own list
    assert chat.open([USER], TOOLS) == first[:-1] == chat.encode(chat.template.text([USER], TOOLS))


# Sampled turns as messages


@each_family
def test_a_call_is_read_and_its_text_is_no_content(family: ModelFamily):
    chat = family.chat()
    said = "" if family.grammar == "llama" else "I add. "
    text = said + family.call
    thought = "hm</think>" if chat.opens_thought else ""
    ids = chat.encode(thought + text) + list(chat.stop_token_ids[:1])
    read = chat.read(ids, TOOLS, turn=7)
    (call,) = read.message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    assert call["id"] in ("c00070000", "abcDEF123", "functions.add:0")
    assert read.message["content"] == said.strip()
    assert chat.read(ids, NO_TOOLS).message["content"] == text


def test_calls_of_one_id_get_ids_of_their_own():
    chat = FAMILIES["mistral31"].chat()
    call = {"name": "add", "arguments": {"a": 1}, "id": "abcDEF123"}
    ids = chat.encode(f"[TOOL_CALLS] {json.dumps([call, call, {**call, 'id': 'x'}, {**call, 'id': '123456789'}])}</s>")
    message = chat.read(ids, TOOLS, turn=12).message
    assert [each["id"] for each in message["tool_calls"]] == ["c00120000", "c00120001", "c00120002", "123456789"]
    results = [{"role": "tool", "content": "1", "tool_call_id": each["id"]} for each in message["tool_calls"]]
    assert chat.extend(ids[-1], [USER], message, results, TOOLS)  # Mistral's template refuses ids of another length


@pytest.mark.parametrize(
    ("name", "turn", "thought", "content"),
    [
        ("qwen3", "<think>\nhm\n</think>\n\nFour.", "hm", "Four."),
        ("qwen3", "\n<think>hm</think>Four.", "hm", "Four."),
        ("qwen3", "<think>\n\n</think>\n\nFour.", None, "Four."),
        ("qwen3", "<think>hm, cut off", "hm, cut off", ""),
        ("qwen3", "Four.</think>", None, "Four.</think>"),
        ("qwen3", "Four <think>or five</think>.", None, "Four <think>or five</think>."),
        ("deepseek_r1", "hm\n</think>\n\nFour.", "hm", "Four."),
        ("deepseek_r1", "<think>\nhm</think>Four.", "hm", "Four."),
        ("deepseek_r1", "hm, cut off", "hm, cut off", ""),
        ("smollm2", "Four.", None, "Four."),
        ("smollm2", "", None, ""),
    ],
)
def test_a_thought_is_apart_from_what_is_said(name: str, turn: str, thought: str | None, content: str):
    chat = FAMILIES[name].chat()
    assert chat.opens_thought is (name == "deepseek_r1")
    for end in (chat.stop_token_ids[0], None):
        ids = chat.encode(turn) + ([end] if end is not None else [])
        message = chat.read(ids, TOOLS).message
        assert (message.get("reasoning_content"), message["content"]) == (thought, content)


def test_a_call_ends_a_thought_that_was_not_ended():
    for name in ("qwen3", "deepseek_r1"):
        chat = FAMILIES[name].chat()
        ids = [*chat.encode(f"<think>I add.\n{FAMILIES[name].call}"), chat.stop_token_ids[0]]
        message = chat.read(ids, TOOLS).message
        assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1, "b": 2}'
        assert (message["reasoning_content"], message["content"]) == ("I add.", "")
        within = [*chat.encode(f"<think>I add. {FAMILIES[name].call}</think>Four."), chat.stop_token_ids[0]]
        assert "tool_calls" not in chat.read(within, TOOLS).message
        assert "tool_calls" not in chat.read(ids, NO_TOOLS).message


def test_a_thought_that_only_questions_open_is_not_expected_behind_a_result():
    # DeepSeek's prompts open a thought after a question, and none after a tool's result.
    family = FAMILIES["deepseek_v3"]
    source = family.source.replace("'<｜Assistant｜>' if add", "'<｜Assistant｜><think>\n' if add")
    template = ChatTemplate(source, family.tokens, special_texts(family.tokenizer(), source), ChatSettings())
    chat = ChatFormat(family.tokenizer(), template, [])
    assert chat.opens_thought
    assert chat.read(chat.encode("hm</think>Four."), TOOLS).message["content"] == "Four."
    assert chat.read(chat.encode("Four."), TOOLS).message["content"] == "Four."


def test_a_special_token_within_a_turn_is_content_and_becomes_no_token_again():
    chat = FAMILIES["qwen3"].chat()
    message = chat.read(chat.encode("a<|im_start|>b<|im_end|>")).message
    assert message["content"] == "a<|im_start|>b"
    start = chat.encode("<|im_start|>")[0]
    assert chat.open([USER, message, USER]).count(start) == chat.open([USER, {**message, "content": "ab"}, USER]).count(
        start
    )


# Checkpoint directories


def directory(path: Path, family: ModelFamily, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    family.tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({**family.tokens, **config}))
    return path


def test_a_checkpoint_is_opened_from_its_files(tmp_path: Path):
    family = FAMILIES["llama32"]
    path = directory(tmp_path / "model", family, bos_token={"content": family.bos}, chat_template=family.source)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 260]}))
    settings = ChatSettings(date="2021-02-03")
    chat = load_chat_format(str(path), settings)
    assert chat.open([USER], TOOLS) == family.chat(date="2021-02-03").open([USER], TOOLS)
    assert chat.stop_token_ids == tuple(sorted({3, 260, *chat.encode("<|eot_id|>")}))
    assert load_chat_format(f"file://{path}/", settings).open([USER]) == chat.open([USER])
    (path / "chat_template.jinja").write_text(FAMILIES["smollm2"].source.replace("im_end", "eot_id"))
    assert "A small helpful model" in load_chat_format(str(path), settings).template.text([USER])
    assert load_chat_format(str(path), ChatSettings(template=str(path / "tokenizer_config.json"))).template  # any text


@pytest.mark.parametrize("names", [("default", "tool_use"), ("default",), ("tool_use",)])
def test_the_template_for_tools_is_used_if_there_are_several(tmp_path: Path, names: tuple[str, ...]):
    family = FAMILIES["qwen3"]
    listed = [{"name": name, "template": family.source.replace("Functions:", name)} for name in names]
    chat = load_chat_format(str(directory(tmp_path, family, chat_template=listed)), ChatSettings())
    assert names[-1] in chat.template.text([USER], TOOLS)


def test_a_base_model_needs_a_template_from_the_settings(tmp_path: Path):
    path = str(directory(tmp_path, FAMILIES["qwen3"]))
    with pytest.raises(TemplateRefused, match=r'has no chat template .* set chat.template to a file or to "chatml"'):
        load_chat_format(path, ChatSettings())
    assert load_chat_format(path, ChatSettings(template="chatml")).template.text([USER]) == (
        "<|im_start|>user\nHow much is it?<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(TemplateRefused, match="does not exist"):
        load_chat_format(path, ChatSettings(template=f"{path}/none.jinja"))
    gemma = str(directory(tmp_path / "gemma", FAMILIES["gemma"]))
    with pytest.raises(TemplateRefused, match="no special token of the chat template ends a turn"):
        load_chat_format(gemma, ChatSettings(template="chatml"))


@pytest.mark.parametrize(
    ("file", "text", "error", "reason"),
    [
        ("tokenizer.json", None, FileNotFoundError, "needs a fast tokenizer's file"),
        ("tokenizer.json", "{", ValueError, "is not a tokenizer"),
        ("tokenizer.json", "\x00" * 1000, ValueError, "is not a tokenizer"),
        ("tokenizer_config.json", "{", ValueError, "is not JSON"),
        ("tokenizer_config.json", "[]", TemplateRefused, "has no chat template"),
        ("tokenizer_config.json", None, TemplateRefused, "has no chat template"),
        ("tokenizer_config.json", '{"chat_template": {"a": 1}}', TemplateRefused, "has no chat template"),
        ("tokenizer_config.json", '{"chat_template": [3, {"name": "rag"}]}', TemplateRefused, "has no chat template"),
        ("tokenizer_config.json", "\udcff", ValueError, "is not UTF-8 text"),
        ("chat_template.jinja", "\udcff", ValueError, "is not UTF-8 text"),
        ("generation_config.json", "{", ValueError, "is not JSON"),
        ("chat_template.jinja", "", TemplateRefused, "does not show a user's message"),
        ("chat_template.jinja", "{% for", TemplateRefused, "not a usable Jinja template"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_its_file(
    tmp_path: Path, file: str, text: str | None, error: type[Exception], reason: str
):
    path = directory(tmp_path, FAMILIES["qwen3"], chat_template=FAMILIES["qwen3"].source)
    assert load_chat_format(str(path), ChatSettings())
    (path / file).unlink(missing_ok=True)
    if text is not None:
        (path / file).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(error, match=reason):
        load_chat_format(str(path), ChatSettings())


def test_a_tokenizer_with_ids_that_the_model_does_not_have_is_refused(tmp_path: Path):
    family = FAMILIES["llama32"]
    config = {"bos_token": family.bos, "pad_token": "<pad>", "chat_template": family.source}
    path, tokenizer = directory(tmp_path, family, **config), family.tokenizer()
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken("<pad>")])  # beyond the model's ids, as often; no prompt has it
    tokenizer.save(str(path / "tokenizer.json"))
    for model in ({}, {"vocab_size": size}, {"text_config": {"vocab_size": size}}):
        (path / "config.json").write_text(json.dumps(model))
        assert load_chat_format(str(path), ChatSettings())
    (path / "config.json").write_text(json.dumps({"vocab_size": size - 1}))
    with pytest.raises(ValueError, match=rf"ids up to {size - 1}, and the model has ids below {size - 1} "):
        load_chat_format(str(path), ChatSettings())


@pytest.mark.parametrize("ends", [None, 5, "5", {"a": 1}, [5, None, "x"]])
def test_unusual_generation_settings_are_accepted(tmp_path: Path, ends: object):
    path = directory(tmp_path, FAMILIES["qwen3"], chat_template=FAMILIES["qwen3"].source, bos_token=3, eos_token=None)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    stops = load_chat_format(str(path), ChatSettings()).stop_token_ids
    assert set(stops) - {5} == set(FAMILIES["qwen3"].chat().stop_token_ids)


def test_a_tokenizer_that_undoes_the_breaking_of_special_tokens_is_refused():
    family = FAMILIES["qwen3"]
    tokenizer = family.tokenizer()
    tokenizer.normalizer = normalizers.Replace("\u2060", "")
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=True)])
    template = ChatTemplate(family.source, {}, special_texts(tokenizer), ChatSettings())
    with pytest.raises(TemplateRefused, match="content can spell the special token <tool_call>"):
        ChatFormat(tokenizer, template, [])


def test_texts_that_structure_a_conversation_are_special_or_written_by_the_template():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens(["<s>", "PAD"])
    tokenizer.add_tokens(["<|x|>", "<｜y｜>", "<tool_call>", "<table>", "[ARGS]", "[1]", "[]", "word"])
    assert special_texts(tokenizer, "{{ '<tool_call>[ARGS]' }}") == {
        "<s>", "PAD", "<|x|>", "<｜y｜>", "<tool_call>", "[ARGS]",
    }  # fmt: skip
    assert special_texts(tokenizer) == special_texts(tokenizer, "<tool_call>[ARGS]<table>[1]")


def test_the_built_in_template_is_a_text_of_its_own():
    assert "<|im_start|>" in chatml() and PROSE not in chatml()
