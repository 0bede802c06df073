"""Keys and tenants through a whole cluster: what the gateway knows of a caller reaches workers."""

import httpx
import pytest

from core.api_keys import KeyEntry, entry_toml, hash_of

pytestmark = pytest.mark.slow

# Longer than a few KV blocks, so that its beginning can be shared.
PROMPT = "Once upon a time there was a river that ran from the hills down to the sea. " * 5


@pytest.fixture(scope="module")
def cluster(start_cluster, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(
        "".join(
            entry_toml(KeyEntry(id=id, hash=hash_of(f"tdm-{id}"), tenant=tenant))
            for id, tenant in (("a1", "acme"), ("a2", "acme"), ("u1", "umbrella"))
        )
    )
    return start_cluster(settings={"gateway": {"api_keys_file": str(keys)}})


def complete(cluster, key):
    body = {"model": "smollm2-135m-instruct", "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    headers = {"authorization": f"Bearer tdm-{key}"}
    return httpx.post(
        f"{cluster.http_url}/v1/completions",
        json=body,
        headers=headers,
        timeout=60,
        trust_env=False,
    )


def cached_tokens(cluster, key):
    reply = complete(cluster, key)
    assert reply.status_code == 200
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_tenants_keys_share_a_prefix_cache_and_two_tenants_never_do(cluster):
    assert cached_tokens(cluster, "a1") == 0
    shared = cached_tokens(cluster, "a2")
    assert shared > 0
    assert cached_tokens(cluster, "u1") == 0
    assert cached_tokens(cluster, "u1") == shared


def test_who_has_no_key_is_refused_and_the_log_says_who_asked(cluster, eventually):
    assert complete(cluster, "nobody").status_code == 401
    assert complete(cluster, "a1").status_code == 200

    def logged():
        lines = [line for line in cluster.events("request") if line["path"] == "/v1/completions"]
        return {(line["status"], line.get("key")) for line in lines} >= {(401, None), (200, "a1")}

    eventually(logged, "both requests are in the log", timeout_s=30)
    assert "tdm-" not in cluster.stderr and "river" not in cluster.stderr
    assert "for whoever shows an API key" in cluster.stdout
