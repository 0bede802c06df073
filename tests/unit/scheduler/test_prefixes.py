"""The scheduler knows who holds which prompt's beginning: as reported, and as just placed."""

from hypothesis import given
from hypothesis import strategies as st

from core.messages import CacheNews
from scheduler.prefixes import PrefixIndex


def index(**held):
    made = PrefixIndex()
    for name, blocks in held.items():
        made.join(name)
        made.report(name, CacheNews(whole=True, published=tuple(blocks)))
    return made


def test_a_chain_is_matched_from_its_beginning_as_far_as_it_is_held():
    made = index(a=[1, 2, 3, 9], b=[1, 2], c=[2, 3], d=[])
    assert made.match((1, 2, 3, 4)) == {"a": 3, "b": 2}
    assert made.match(()) == {}
    assert made.match((7,)) == {}


def test_what_was_evicted_is_not_found():
    made = index(a=[1, 2, 3])
    made.report("a", CacheNews(evicted=(2,), published=(4,)))
    assert made.match((1, 2, 3)) == {"a": 1}


def test_a_whole_report_replaces_what_was_known():
    made = index(a=[1, 2], b=[1])
    made.report("a", CacheNews(whole=True, published=(5,)))
    assert made.match((1, 2)) == {"b": 1}
    assert made.match((5,)) == {"a": 1}


def test_what_was_placed_counts_at_once_and_is_forgotten_where_it_never_came():
    made = index(a=[], b=[])
    made.hope("a", (1, 2), now_s=0.0)
    assert made.match((1, 2)) == {"a": 2}
    made.report("a", CacheNews(published=(1,)))
    made.forget(now_s=29.0)
    assert made.match((1, 2)) == {"a": 2}
    made.forget(now_s=30.0)
    assert made.match((1, 2)) == {"a": 1}


def test_a_worker_that_left_holds_nothing_and_its_next_life_begins_with_nothing():
    made = index(a=[1], b=[1])
    made.leave("a")
    assert made.match((1,)) == {"b": 1}
    made.hope("a", (1,), now_s=0.0)
    made.join("a")
    assert made.match((1,)) == {"b": 1}
    made.leave("a")
    made.leave("b")
    assert len(made) == 0


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sets(st.integers(0, 8)), st.sets(st.integers(0, 8))),
        max_size=20,
    ),
    st.lists(st.integers(0, 8), unique=True),
)
def test_it_finds_what_the_reports_add_up_to(reports, chain):
    made = index(a=[], b=[], c=[])
    held = {name: set() for name in "abc"}
    for name, published, evicted in reports:
        published = published - evicted
        made.report(name, CacheNews(published=tuple(published), evicted=tuple(evicted)))
        held[name] = (held[name] - evicted) | published
    expected = {}
    for name, blocks in held.items():
        count = next((i for i, each in enumerate(chain) if each not in blocks), len(chain))
        if count:
            expected[name] = count
    assert made.match(tuple(chain)) == expected
