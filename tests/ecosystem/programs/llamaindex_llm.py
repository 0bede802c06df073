"""What LlamaIndex makes of a server. `python llamaindex_llm.py URL MODEL KEY` prints JSON."""

import json
import sys

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

MESSAGES = [ChatMessage(role="user", content="What is the capital of France?")]


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def main(url: str, model: str, key: str) -> dict[str, object]:
    options = {"api_base": url, "api_key": key, "max_retries": 0, "timeout": 120}
    limits = {"temperature": 0, "max_tokens": 64, "context_window": 2048}
    chat = OpenAILike(  # strict, since so small a model goes on with arguments of its own otherwise
        model=model,
        is_chat_model=True,
        is_function_calling_model=True,
        strict=True,
        **options,
        **limits,
    )
    text = OpenAILike(model=model, is_chat_model=False, **options, **(limits | {"max_tokens": 8}))
    told: dict[str, object] = {
        "models": [each.id for each in chat._get_client().models.list()],
        "chat": chat.chat(MESSAGES).message.content,
        "streamed": "".join(chunk.delta or "" for chunk in chat.stream_chat(MESSAGES)),
        "completion": text.complete("1, 2, 3, 4,").text,
        "completion_streamed": "".join(c.delta or "" for c in text.stream_complete("1, 2, 3, 4,")),
    }
    try:
        wrong = {"top_p": 9}  # llama-index itself looks at the temperature
        OpenAILike(model=model, is_chat_model=True, additional_kwargs=wrong, **options).chat(
            MESSAGES
        )
    except openai.BadRequestError as error:
        told["error"] = [error.status_code, error.param]
    try:
        OpenAILike(model="nobody", is_chat_model=True, **options).chat(MESSAGES)
    except openai.NotFoundError as error:
        told["no_model"] = error.code
    return told | tools(chat)


def tools(chat: OpenAILike) -> dict[str, object]:
    """A call that must be made."""
    tool = FunctionTool.from_defaults(get_weather)
    question = "How is the weather in Paris?"
    try:
        made = chat.chat_with_tools([tool], user_msg=question, tool_required=True)
    except openai.BadRequestError as error:
        return {"tools_refused": error.code}
    (call,) = chat.get_tool_calls_from_response(made)
    return {"tool": call.tool_name, "arguments": call.tool_kwargs}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
