"""cuda_ipc: on a GPU what the contract says, and without one a refusal that says so."""

import pytest
import torch

from core.errors import ConfigError, Incompatible
from core.messages import TransferId, TransportOffer
from kv_transfer.cuda_ipc import CudaIpcReceiver

TRANSFER = TransferId(request_id="request", attempt=1)
has_gpu = torch.cuda.is_available()


@pytest.fixture
def pair(make_pair):
    """For its names and its peer; its own pool is in host memory."""
    return make_pair("tcp")


@pytest.mark.skipif(has_gpu, reason="there is a GPU here")
def test_without_a_gpu_the_sender_says_so(pair):
    offer = TransportOffer(name="cuda_ipc", address="/dev/shm/none", payload=b"{}")
    with pytest.raises(Incompatible, match="cuda_ipc: there is no GPU here"):
        pair.peer.connect([offer])


def test_a_pool_in_host_memory_is_a_configuration_error(pair):
    for pool in (pair.pool, torch.zeros((2, 8), dtype=torch.uint8)):
        with pytest.raises(ConfigError, match="on a GPU"):
            CudaIpcReceiver(pool, pair.me)


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu, reason="needs a GPU")
def test_blocks_and_pieces_arrive_and_a_closed_writer_is_seen(pair, eventually):
    pool = torch.zeros((4, pair.block_bytes), dtype=torch.uint8, device="cuda")
    receiver = CudaIpcReceiver(pool, pair.me)
    sender = pair.peer.connect([receiver.offer(pair.writer)])
    half = pair.block_bytes // 2
    sender.write(TRANSFER, 0, 3, seed=1)
    sender.write(TRANSFER, 1, 1, seed=2, offset=half, size=pair.block_bytes - half)
    sender.write(TRANSFER, 1, 1, seed=2, size=half)
    sender.flush()
    expected = torch.from_numpy(pair.data(2, 1))
    assert torch.equal(pool[[1, 3]].cpu(), expected)
    assert not pool[[0, 2]].any()
    assert receiver.revoke(TRANSFER) is False
    assert not receiver.is_dead(pair.writer)
    sender.close()
    eventually(lambda: receiver.is_dead(pair.writer))
    receiver.close()
    receiver.close()
