"""What is wrong with a GPU is said in one line with the numbers, before any weight is read."""

from dataclasses import replace

import pytest
import torch

from core.config import ClusterConfig, NetworkConfig
from core.errors import ConfigError
from engine.device import choose_device, place_of
from engine.model_config import ModelConfig
from engine.preflight import (
    GIB,
    DriverFacts,
    GpuFacts,
    check_driver,
    check_gpus,
    check_memory,
    pool_bytes,
    weight_bytes,
)
from tests.unit.engine.test_paged_model import CONFIG, random_weights

H100 = GpuFacts(index=0, name="H100", capability=(9, 0), total_bytes=80 * GIB, free_bytes=79 * GIB)
GOOD = DriverFacts(torch_version="2.13.0", built_for=(13, 0), driver=(13, 1))


def refused(match: str):
    return pytest.raises(ConfigError, match=match)


def test_a_driver_of_the_same_major_or_a_newer_one_will_do() -> None:
    for driver in ((13, 0), (13, 2), (14, 0)):
        check_driver(replace(GOOD, driver=driver))
    with refused(r"too old: it has CUDA 12\.4, and torch 2\.13\.0 needs CUDA 13\.0"):
        check_driver(replace(GOOD, driver=(12, 4)))
    with refused("there is no NVIDIA driver"):
        check_driver(replace(GOOD, driver=None))
    with refused("built without CUDA"):
        check_driver(replace(GOOD, built_for=None))


def test_gpus_must_be_alike_and_new_enough() -> None:
    check_gpus([H100, replace(H100, index=1)])
    with refused(r"mixed compute capabilities: GPU 0 .*9\.0\) and GPU 1 \(A100.*8\.0\)"):
        check_gpus([H100, replace(H100, index=1, name="A100", capability=(8, 0))])
    with refused(r"GPU 0 \(V100, compute capability 7\.0\) is too old; 8\.0 is the least"):
        check_gpus([replace(H100, name="V100", capability=(7, 0))])
    with refused("there is no GPU here"):
        check_gpus([])


def test_a_gpu_too_small_is_told_with_the_numbers() -> None:
    def check(num_workers: int = 1, free: int = 79, share: float = 0.9) -> None:
        check_memory(
            replace(H100, free_bytes=free * GIB),
            model_bytes=30 * GIB,
            window_kv_bytes=16 * GIB,
            share=share,
            num_workers=num_workers,
        )

    check()
    with refused(
        r"30\.0 GiB of weights and 16\.0 GiB of KV .* gets 36\.0 GiB \(0\.9 of 80\.0 GiB "
    ):
        check(num_workers=2)
    with refused(r"gets 40\.0 GiB .* 40\.0 GiB free\)"):
        check(free=40)
    with refused("engine.max_model_len"):
        check(share=0.5)


def test_the_pool_is_what_weights_and_activations_leave() -> None:
    assert pool_bytes(H100, used_bytes=20 * GIB, share=0.9, num_workers=1) == 52 * GIB
    assert pool_bytes(H100, used_bytes=20 * GIB, share=0.9, num_workers=2) == 16 * GIB
    small = replace(H100, free_bytes=30 * GIB)
    assert pool_bytes(small, used_bytes=20 * GIB, share=0.9, num_workers=1) == 10 * GIB
    assert pool_bytes(small, used_bytes=31 * GIB, share=0.9, num_workers=1) == 0


@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_bytes_are_counted_exactly(tied: bool) -> None:
    weights = random_weights()
    tensors = [weights.embedding, weights.final_norm, *([] if tied else [weights.head])]
    for layer in weights.layers:
        fields = (getattr(layer, name) for name in layer.__dataclass_fields__)
        tensors += [each for each in fields if isinstance(each, torch.Tensor)]
    config = replace(CONFIG, tie_embeddings=tied)
    assert weight_bytes(config, 4) == sum(tensor.nbytes for tensor in tensors)


def test_biases_and_head_norms_are_counted() -> None:
    def more(**changes: bool) -> int:
        changed: ModelConfig = replace(CONFIG, **changes)
        return (weight_bytes(changed, 1) - weight_bytes(CONFIG, 1)) // CONFIG.num_layers

    assert more(qkv_bias=True) == (4 + 2 * 2) * 8
    assert more(output_bias=True) == 24
    assert more(mlp_bias=True) == 2 * 40 + 24
    assert more(qk_norm=True) == 2 * 8


def test_workers_take_gpus_by_their_number_prefill_first() -> None:
    config = ClusterConfig(prefill_workers=2, decode_workers=2)
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    assert [place_of(name, config).index for name in names] == [0, 1, 2, 3]
    assert place_of("worker", config).num_workers == 4


def test_a_worker_that_was_started_alone_has_its_gpus_to_itself() -> None:
    network = NetworkConfig(schedulers=("scheduler:50052",))
    config = ClusterConfig(prefill_workers=1, decode_workers=3, network=network)
    place = place_of("tandem-decode-5d8f-x2", config)
    assert (place.index, place.num_workers) == (0, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused() -> None:
    place = place_of("decode-0", ClusterConfig())
    assert choose_device("auto", place).device.type == "cpu"
    with refused(r"engine\.device: "):
        choose_device("cuda", place)
