"""Where a process looks for the leader, and whom it believes."""

from core.fence import Fence
from core.leader_finder import LeaderFinder
from core.messages import Standby, Welcome
from core.store.lease import Candidate, Lease


def welcome(token):
    return Welcome(scheduler="s", leader_token=token)


def lease(token, address):
    return Lease(token=token, leader=Candidate(holder="s/1", address=address))


def found(token=5):
    """A finder whose stream goes to a leader at `a`."""
    finder = LeaderFinder(["a", "b"], Fence())
    assert finder.next_address() == "a"
    assert finder.welcomed(welcome(token))
    return finder


def test_schedulers_are_tried_one_after_the_other():
    finder = LeaderFinder(["a", "b", "c"], Fence())
    assert [finder.next_address() for _ in range(4)] == ["a", "b", "c", "a"]


def test_a_standby_says_whom_to_try_next():
    finder = LeaderFinder(["a", "b", "c"], Fence())
    finder.next_address()
    finder.refused(Standby(leader_address="c", leader_token=1))
    assert finder.next_address() == "c"


def test_a_hint_that_was_wrong_is_not_followed_twice():
    finder = LeaderFinder(["a", "b"], Fence())
    finder.next_address()
    finder.refused(Standby(leader_address="dead", leader_token=1))
    assert [finder.next_address() for _ in range(3)] == ["dead", "b", "a"]


def test_after_a_lost_connection_the_same_leader_is_tried_first():
    finder = found()
    assert [finder.next_address(), finder.next_address()] == ["a", "b"]


def test_a_leader_that_was_replaced_is_not_obeyed():
    finder = found(token=5)
    finder.next_address()
    assert not finder.welcomed(welcome(4))
    assert not finder.obeyed
    assert finder.leader_token == 5


def test_a_standby_that_still_believes_in_an_earlier_leader_is_not_followed():
    finder = found(token=5)
    finder.next_address()
    finder.refused(Standby(leader_address="old", leader_token=4))
    assert finder.next_address() == "b"


def test_word_of_a_later_leader_cuts_the_stream_and_says_where_to_go():
    finder = found(token=5)
    assert finder.heard(lease(6, "b"))
    assert finder.next_address() == "b"


def test_word_of_the_same_leader_or_an_earlier_one_cuts_nothing():
    finder = found(token=5)
    assert not finder.heard(lease(5, "a"))
    assert not finder.heard(lease(6, "a"))  # it got another token, and says so itself
    assert not finder.heard(lease(4, "b"))


def test_hearsay_raises_no_fence():
    finder = found(token=5)
    finder.heard(lease(10**9, "nowhere"))
    assert finder.leader_token == 5
    finder.next_address()
    assert finder.welcomed(welcome(5))


def test_a_token_seen_elsewhere_makes_the_stream_outdated():
    fence = Fence()
    finder = LeaderFinder(["a"], fence)
    finder.next_address()
    finder.welcomed(welcome(5))
    assert not finder.outdated
    fence.admit(6)
    assert finder.outdated


def test_a_workers_refusal_counts_only_against_the_leader_who_signed():
    finder = found(token=5)
    assert not finder.doubts(4)
    assert finder.doubts(5)
    assert finder.next_address() == "b"
