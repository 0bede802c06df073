"""What the official client makes of keys and quotas.

`python openai_refused.py URL MODEL KEY`, whose key may ask once a minute, prints one JSON object.
"""

import json
import sys

import openai


def ask(url: str, model: str, key: str) -> list[object]:
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=120) as client:
        try:
            client.completions.create(model=model, prompt="x", max_tokens=1)
        except openai.APIStatusError as error:
            after = error.response.headers.get("retry-after")
            return [type(error).__name__, error.status_code, error.code, after is not None]
    return []


if __name__ == "__main__":
    where, served, known = sys.argv[1:]
    told = {
        "unknown": ask(where, served, "sk-nobody"),
        "first": ask(where, served, known),
        "second": ask(where, served, known),
    }
    print(json.dumps(told))
