"""A short piece of `make chaos-handoff`: faults at every turn, no wrong token, no lost block."""

import pytest

from bench import chaos
from bench.chaos_account import Account
from bench.cluster import merged
from bench.streams import StreamClient

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

NUM_REQUESTS = 72
# More than in the long run, for fewer requests. By this seed prefill-0 kills itself once.
ODDS = {
    "drop": 0.01,
    "truncate": 0.01,
    "corrupt": 0.04,
    "duplicate": 0.05,
    "reorder": 0.05,
    "delay": 0.05,
    "stall": 0.005,
    "kill": 0.005,
    "freeze": 0.0,
}
RUN = chaos.Run(transport="shm", push="blocks", seed=96)


def test_requests_amid_faults_get_the_right_tokens_once_and_lose_no_block(
    start_cluster, cluster, card
):
    requests = chaos.make_requests(card.tokenizer_path, NUM_REQUESTS, longest=48, most_tokens=6)
    with StreamClient(cluster.grpc_target) as client:
        expected = [stream.token_ids for stream in client.answer_all(requests)]
    settings = chaos.settings(RUN.transport, RUN.push, RUN.faults(ODDS))
    shaken = start_cluster(settings=merged(settings, {"log_level": "info"}))
    account = Account()
    chaos.run_through(shaken.endpoints, requests, expected, account)
    shaken.close()
    assert account.sound, account
    assert account.requests == NUM_REQUESTS
    assert account.outcomes["length"] > NUM_REQUESTS * 0.9
    assert set(account.outcomes) <= {"length", "data_loss", "unavailable"}
    assert account.faults["kill"] >= 1
