"""No text in a tool, a call or a tool's answer becomes a control token, whatever channel it takes.

The tokenizers and the default model are those of `test_prompt_safety`; the templates here print
every field of tools and calls in the ways that models' own templates do.
"""

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvalidRequest
from core.model_card import TEMPLATE_FILE, TOKENIZER_FILE
from engine.prepare import prepare
from gateway.inputs import ChatMessage, Tool, ToolCall
from gateway.template import ChatTemplate
from gateway.tokenizer import PromptTokenizer
from gateway.tools.asked import checked_call
from tests.unit.gateway.test_prompt_safety import STYLES, Model, lookalikes

# `open` and `shut` are control tokens of the style; the rest is what clients can fill.
LOOP = (
    "{{% for t in tools or [] %}}{open}{{{{ t | tojson }}}}{{{{ t.function.name }}}}"
    "{{{{ t.function.description }}}}{{{{ t.function.parameters | tojson(indent=2) }}}}"
    "{{% for k, v in t.function.parameters.properties | items %}}"
    "{{{{ k }}}}{{{{ v }}}}{{% endfor %}}"
    "{shut}{{% endfor %}}"
    "{{% for m in messages %}}{open}{{{{ m.role }}}}{{{{ m.content | trim }}}}{{{{ m.name }}}}"
    "{{{{ m.tool_call_id }}}}{{% for c in m.tool_calls or [] %}}"
    "{{{{ c.id }}}}{{{{ c.function.name }}}}"
    "{{{{ c.function.arguments | tojson }}}}{{% for k, v in c.function.arguments | items %}}"
    "{{{{ k ~ '=' ~ v }}}}{{% endfor %}}{{% endfor %}}{shut}{{% endfor %}}{open}"
)
EDGES = {
    "llama3": ("<|start_header_id|>", "<|eot_id|>"),
    "qwen2": ("<|im_start|>", "<|im_end|>"),
    "compatible": ("<|im_start|>", "<|im_end|>"),
    "mistral": ("[INST]", "[/INST]"),
    "mistral-always": ("[INST]", "[/INST]"),
    "mistral-legacy": ("[INST]", "[/INST]"),
}
CHANNELS = ("description", "key", "value", "argument", "argument_key", "result", "id", "call_id")


@pytest.fixture(scope="module", params=["default", *STYLES])
def model(request, tmp_path_factory):
    """The default model is told of tools in words, the styles by a template of theirs."""
    card = prepare("smollm2-135m-instruct")
    if request.param != "default":
        make, _, bos = STYLES[request.param]
        folder = tmp_path_factory.mktemp(request.param)
        make().save(str(folder / TOKENIZER_FILE))
        opening, closing = EDGES[request.param]
        (folder / TEMPLATE_FILE).write_text(LOOP.format(open=opening, shut=closing))
        card = replace(card, folder=str(folder), bos_token=bos, eos_token="")
    tokenizer = PromptTokenizer(card)
    return Model(tokenizer, ChatTemplate(card, tokenizer.controls, window=8192))


def conversation(**texts):
    """A chat with a tool, a call of it and its answer; each channel's text is "x" but for these."""
    said = dict.fromkeys(CHANNELS, "x") | texts
    schema = {
        "type": "object",
        "properties": {said["key"]: {"enum": [said["value"], {"deep": [said["value"]]}]}},
    }
    arguments = json.dumps({said["argument_key"]: [said["argument"], {"a": said["argument"]}]})
    call = ToolCall(id=said["call_id"], name="f", arguments=arguments)
    messages = (
        ChatMessage(role="user", content="x"),
        ChatMessage(role="assistant", content="", tool_calls=(call,)),
        ChatMessage(role="tool", content=said["result"], tool_call_id=said["id"], name="f"),
    )
    return messages, (Tool(name="f", description=said["description"], parameters=schema),)


def controls(model, **texts):
    messages, tools = conversation(**texts)
    rendered = model.template.render(messages, tools)
    return model.controls(model.tokenizer.encode_rendered(rendered))


def test_every_literal_is_text_in_every_channel(model):
    tame = controls(model)
    assert len(tame) >= 4
    for literal in model.tokenizer.controls.literals:
        for channel in CHANNELS:
            for spelled in lookalikes(literal):
                assert controls(model, **{channel: f"a{spelled} {spelled}"}) == tame, channel


def test_no_literal_is_put_together_from_two_channels(model):
    tame = controls(model)
    for literal in model.tokenizer.controls.literals:
        for cut in range(1, len(literal)):
            head, tail = literal[:cut], literal[cut:]
            for first, second in itertools.pairwise(CHANNELS):
                assert controls(model, **{first: head, second: tail}) == tame


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_mixture_in_any_channels_leaves_the_templates_tokens_alone(model, data):
    literals = model.tokenizer.controls.literals
    whole = st.sampled_from([each for literal in literals for each in lookalikes(literal)])
    part = st.sampled_from([literal[i:] for literal in literals for i in range(len(literal))])
    text = st.text("<|>[]/\u2581 im_endINST\n\\\"'{}u00\u0301", max_size=6)
    content = st.lists(st.one_of(whole, part, text), min_size=1, max_size=5).map("".join)
    texts = data.draw(st.dictionaries(st.sampled_from(CHANNELS), content, max_size=4))
    assert controls(model, **texts) == controls(model)


def test_arguments_cannot_bring_the_characters_that_stand_for_masked_ones():
    """A lone surrogate in JSON's escapes is the only way to write one, and it is refused."""
    for text in ('{"a": "\\ud800|im_start|>"}', '{"\\ud801": 1}', '{"a": ["\\udfff"]}'):
        with pytest.raises(InvalidRequest, match="surrogate"):
            checked_call("c", "f", text, "messages[0].tool_calls[0]")
    pair = checked_call("c", "f", '{"a": "\\ud83d\\ude00"}', "x")
    assert json.loads(pair.arguments) == {"a": "\U0001f600"}
