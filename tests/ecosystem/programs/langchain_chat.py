"""What LangChain makes of a server. `python langchain_chat.py URL MODEL KEY` prints JSON."""

import json
import sys

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

MESSAGES = [
    SystemMessage("Answer in one sentence."),
    HumanMessage("What is the capital of France?"),
]


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def main(url: str, model: str, key: str) -> dict[str, object]:
    options = {"base_url": url, "api_key": key, "model": model, "max_retries": 0, "timeout": 120}
    chat = ChatOpenAI(**options, temperature=0, max_tokens=24, stream_usage=True)
    whole = chat.invoke(MESSAGES)
    chunks = list(chat.stream(MESSAGES))
    streamed = chunks[0]
    for chunk in chunks[1:]:
        streamed += chunk
    batch = chat.batch([MESSAGES, MESSAGES])
    text = OpenAI(**options, temperature=0, max_tokens=8)
    told: dict[str, object] = {
        "chat": whole.content,
        "chat_usage": whole.usage_metadata["total_tokens"],
        "streamed": streamed.content,
        "streamed_usage": streamed.usage_metadata["total_tokens"],
        "batch": [each.content for each in batch],
        "completion": text.invoke("1, 2, 3, 4,"),
        "completion_streamed": "".join(text.stream("1, 2, 3, 4,")),
    }
    try:
        ChatOpenAI(**options, temperature=9).invoke(MESSAGES)
    except openai.BadRequestError as error:
        told["error"] = [error.status_code, error.param]
    try:
        ChatOpenAI(**(options | {"model": "nobody"})).invoke(MESSAGES)
    except openai.NotFoundError as error:
        told["no_model"] = error.code
    return told | tools(options)


def tools(options: dict[str, object]) -> dict[str, object]:
    """A call that must be made, and the answer to its result."""
    chat = ChatOpenAI(**options, temperature=0, max_tokens=64)
    question = HumanMessage("How is the weather in Paris?")
    try:
        # Strict, since a model this small goes on with arguments of its own otherwise.
        bound = chat.bind_tools([get_weather], tool_choice="get_weather", strict=True)
        made = bound.invoke([question])
    except openai.BadRequestError as error:
        return {"tools_refused": error.code}
    (call,) = made.tool_calls
    result = get_weather.invoke(call)
    final = chat.bind_tools([get_weather]).invoke([question, made, result])
    assert isinstance(final, AIMessage)
    return {"tool": call["name"], "arguments": call["args"], "after_tool": bool(final.content)}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
