"""Streams an answer with the official OpenAI client: python examples/openai_chat.py "Hello"."""

import os
import sys

from openai import OpenAI

question = sys.argv[1] if len(sys.argv) > 1 else "What is the capital of France?"
url = os.environ.get("TANDEM_URL", "http://127.0.0.1:8000")

with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
    model = client.models.list().data[0].id
    with client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            if chunk.usage:
                used = chunk.usage
                print(f"\n[{used.prompt_tokens} prompt tokens, {used.completion_tokens} answered]")
