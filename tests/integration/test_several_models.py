"""One cluster serves two models: by HTTP and gRPC, by name and alias, at the same time."""

import json
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest

from cli import top_tables
from cli.operator_client import OperatorClient
from core.config import DEFAULT_MODEL
from core.model_card import ModelCard
from protos.tandem.v1 import inference_pb2 as pb
from protos.tandem.v1 import inference_pb2_grpc

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France?"


def _save_tiny(folder: Path, card: ModelCard) -> None:
    """A random Qwen2 with the default model's tokenizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(3)
        config = Qwen2Config(
            vocab_size=card.vocab_size,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            eos_token_id=card.eos_token_ids[0],
            bos_token_id=None,
            tie_word_embeddings=True,
            initializer_range=0.2,
        )
        Qwen2ForCausalLM(config).float().save_pretrained(folder)
    shutil.copyfile(card.tokenizer_path, folder / "tokenizer.json")
    settings = {"eos_token": card.eos_token, "chat_template": card.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def two(start_cluster, card, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    _save_tiny(folder, card)
    models = [
        {"model": DEFAULT_MODEL, "aliases": ["default"]},
        {"model": str(folder), "served_name": "tiny", "prefill_workers": 0},
    ]
    pools = {"prefill_kv_bytes": 2**28, "decode_kv_bytes": 2**28}
    made = start_cluster(settings={"models": models, "engine": pools})
    yield made
    made.stop()


def _chat(two, model: str) -> dict:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 8,
    }
    url = f"{two.http_url}/v1/chat/completions"
    return httpx.post(url, json=body, timeout=120, trust_env=False).raise_for_status().json()


def _generate(stub, model: str) -> tuple[int, ...]:
    greedy = pb.SamplingOptions(temperature=0, max_tokens=8, ignore_eos=True)
    request = pb.GenerateRequest(model=model, text="Once upon a time", sampling=greedy)
    events = list(stub.Generate(request, timeout=120))
    return tuple(token for event in events for token in event.delta.token_ids)


def test_two_models_answer_at_the_same_time_each_with_its_own_tokens(two, eventually):
    with grpc.insecure_channel(two.grpc_target) as channel, ThreadPoolExecutor(8) as threads:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        alone = {model: _generate(stub, model) for model in (DEFAULT_MODEL, "tiny")}
        names = (DEFAULT_MODEL, "default", "tiny") * 2
        chats = [threads.submit(_chat, two, name) for name in names]
        texts = [threads.submit(_generate, stub, name) for name in names]
        for name, chat, text in zip(names, chats, texts, strict=True):
            own = "tiny" if name == "tiny" else DEFAULT_MODEL
            assert chat.result()["model"] == own
            assert text.result() == alone[own]
            said = chat.result()["choices"][0]["message"]["content"]
            assert ("Paris" in said) == (own == DEFAULT_MODEL)
        assert alone[DEFAULT_MODEL] != alone["tiny"]
        listed = stub.ListModels(pb.ListModelsRequest(), timeout=20).models
        assert {model.id: model.alias_of for model in listed} == {
            DEFAULT_MODEL: "",
            "default": DEFAULT_MODEL,
            "tiny": "",
        }
    eventually(two.is_at_rest, "every block is free", timeout_s=30)


def test_each_model_has_workers_of_its_own(two):
    told = httpx.get(f"{two.admin_url}/cluster", timeout=20, trust_env=False).json()
    roles = sorted((each["model"], each["role"]) for each in told["workers"])
    assert roles == [(DEFAULT_MODEL, "decode"), (DEFAULT_MODEL, "prefill"), ("tiny", "decode")]
    placed = {each["model"]: sum(each["placements"].values()) for each in told["models"]}
    assert all(count > 0 for count in placed.values())


async def test_operators_see_each_model(two):
    _chat(two, "tiny")
    async with OperatorClient(two.admin_url) as client:
        snapshot = await client.snapshot()
    assert [row[0] for row in top_tables.models(snapshot)] == [DEFAULT_MODEL, "tiny"]
    assert [row[1] for row in top_tables.workers(snapshot)] == [DEFAULT_MODEL] * 2 + ["tiny"]
    (latency,) = snapshot.latencies.values()
    assert set(latency["models"]) == {DEFAULT_MODEL, "tiny"}
    async with httpx.AsyncClient(timeout=20, trust_env=False) as http:
        found = (await http.get(f"{two.admin_url}/sd")).json()
        (page,) = [each["targets"][0] for each in found if each["labels"]["role"] == "gateway"]
        listed = (await http.get(f"http://{page}/requests?model=tiny")).json()["requests"]
    assert {each["model"] for each in listed} == {"tiny"}
