"""What the official client makes of a server; the same words for its second and third generation.

`python openai_sdk.py URL MODEL KEY` prints one JSON object.
"""

import asyncio
import json
import sys

import openai

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def main(url: str, model: str, key: str) -> dict[str, object]:
    told: dict[str, object] = {"version": openai.__version__}
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=120) as client:
        told["models"] = [each.id for each in client.models.list()]
        told["model"] = client.models.retrieve(model).id
        told |= chat(client, model) | completion(client, model) | tools(client, model)
        told["errors"] = errors(client, model)
    told["async"] = asyncio.run(streamed_and_left(url, model, key))
    return told


def chat(client: openai.OpenAI, model: str) -> dict[str, object]:
    asked = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**asked, user="someone", metadata={"a": "b"})
    usage = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=usage))
    raw = client.chat.completions.with_raw_response.create(
        **asked, extra_headers={"X-Request-Id": "label-1"}
    )
    return {
        "chat": whole.choices[0].message.content,
        "chat_finish": whole.choices[0].finish_reason,
        "chat_usage": whole.usage.total_tokens,
        "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
        "streamed_usage": chunks[-1].usage.total_tokens,
        "request_id": raw.headers["x-request-id"],
    }


def completion(client: openai.OpenAI, model: str) -> dict[str, object]:
    asked = {"model": model, "prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    return {
        "completion": whole.choices[0].text,
        "completion_streamed": "".join(c.choices[0].text for c in chunks),
    }


def tools(client: openai.OpenAI, model: str) -> dict[str, object]:
    """A call that must be made, whole and streamed."""
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": "How is the weather in Paris?"}],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "temperature": 0,
        "max_tokens": 64,
    }
    try:
        whole = client.chat.completions.create(**asked)
    except openai.BadRequestError as error:
        return {"tools_refused": error.code}
    (call,) = whole.choices[0].message.tool_calls
    chunks = list(client.chat.completions.create(**asked, stream=True))
    deltas = [made for c in chunks if c.choices for made in c.choices[0].delta.tool_calls or ()]
    return {
        "tool": call.function.name,
        "arguments": json.loads(call.function.arguments),
        "tool_streamed": deltas[0].function.name,
        "arguments_streamed": json.loads("".join(d.function.arguments or "" for d in deltas)),
        "tool_finish": whole.choices[0].finish_reason,
    }


def errors(client: openai.OpenAI, model: str) -> dict[str, object]:
    def caught(**fields: object) -> list[object]:
        asked = {"model": model, "messages": QUESTION, "max_tokens": 4} | fields
        try:
            client.chat.completions.create(**asked)
        except openai.APIStatusError as error:
            return [type(error).__name__, error.status_code, error.code, error.param]
        return []

    return {
        "range": caught(temperature=9),
        "stream": caught(temperature=9, stream=True),
        "model": caught(model="nobody"),
        "unsupported": caught(modalities=["audio"]),
        "window": caught(max_tokens=1_000_000),
    }


async def streamed_and_left(url: str, model: str, key: str) -> str:
    """A long answer that is not read to its end."""
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=120) as client:
        stream = await client.chat.completions.create(
            model=model,
            messages=QUESTION,
            stream=True,
            max_tokens=4000,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                await stream.close()
                return "left"
    return "ended"


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
