"""What the client has of each choice, and what another attempt is told of it."""

from core.messages import StopReason, TokenLogprobs, Tokens, TransferId
from gateway.progress import Progress

R = TransferId(request_id="r", attempt=1)


def tokens(choice, *ids, **fields):
    return Tokens(transfer=R, choice=choice, token_ids=ids, **fields)


def test_tokens_that_came_together_are_one_batch_for_each_choice():
    progress = Progress(2)
    first, second = progress.take((tokens(0, 1), tokens(1, 5), tokens(0, 2)), None)
    assert (first.choice, first.token_ids, first.stop_reason) == (0, (1, 2), None)
    assert (second.choice, second.token_ids) == (1, (5,))
    assert progress.begun and progress.goes_on


def test_a_choice_ends_for_its_own_reason_and_the_rest_for_the_requests():
    progress = Progress(3)
    (first,) = progress.take((tokens(1, 4, stop_reason=StopReason.EOS),), None)
    assert (first.choice, first.stop_reason) == (1, StopReason.EOS)
    rest = progress.take((tokens(0, 6),), StopReason.LENGTH)
    assert [(each.choice, each.token_ids, each.stop_reason) for each in rest] == [
        (0, (6,), StopReason.LENGTH),
        (2, (), StopReason.LENGTH),
    ]
    assert not progress.goes_on


def test_another_attempt_begins_with_the_longest_and_leaves_out_what_has_ended():
    progress = Progress(4)
    progress.take((tokens(0, 1), tokens(1, 2, 3), tokens(3, 4, 5)), None)
    progress.take((tokens(3, 6, stop_reason=StopReason.EOS),), None)
    progress.end(2)
    branches = progress.branches()
    assert [(each.choice, each.sent_token_ids) for each in branches] == [(1, (2, 3)), (0, (1,))]


def test_nothing_comes_of_a_choice_that_is_not_wanted_any_more():
    progress = Progress(2)
    progress.end(1)
    progress.end(1)
    assert progress.take((tokens(1, 9),), None) == []
    assert [each.choice for each in progress.take((tokens(0, 3),), StopReason.EOS)] == [0]


def test_log_probabilities_stay_beside_their_tokens():
    progress = Progress(2)
    told = [TokenLogprobs(logprob=-float(i)) for i in range(3)]
    first, second = progress.take(
        (
            tokens(0, 1, logprobs=(told[0],)),
            tokens(1, 5, logprobs=(told[1],)),
            tokens(0, 2, logprobs=(told[2],)),
        ),
        None,
    )
    assert first.logprobs == (told[0], told[2])
    assert second.logprobs == (told[1],)
