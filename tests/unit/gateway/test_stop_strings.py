"""Stop strings: nothing of one gets out, nothing else is kept, however the text is cut."""

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.stop_strings import StopStrings

TEXT = st.text(alphabet="abc\n한", max_size=40)
STOPS = st.lists(st.text(alphabet="abc\n한", min_size=1, max_size=5), max_size=4).map(tuple)


def reference(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The first end of a stop string, seen from the left; of several there, the longest."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            start = end - max(lengths)
            return text[:start], text[start:end]
    return text, None


def run(text: str, stops: tuple[str, ...], cuts: list[int]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    out, start = "", 0
    for cut in [*sorted(cuts), len(text)]:
        out += matcher.feed(text[start:cut])
        start = cut
    return out + matcher.finish(), matcher.matched


@given(TEXT, STOPS, st.data())
@example("123", ("12", "123"), None)
@example("abcabd", ("abd", "bca"), None)
def test_any_cut_gives_what_the_whole_text_gives(text, stops, data):
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8)) if data else [1, 2]
    assert run(text, stops, cuts) == reference(text, stops)


@given(TEXT, STOPS)
def test_only_a_beginning_of_a_stop_string_is_held_back(text, stops):
    matcher = StopStrings(stops)
    seen = out = ""
    for char in text:
        seen += char
        out += matcher.feed(char)
        if matcher.matched:
            return
        held = seen[len(out) :]
        longest = max(
            (n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0
        )
        assert held == seen[len(seen) - longest :]


def test_nothing_comes_out_after_a_match():
    matcher = StopStrings(("END",))
    assert matcher.feed("one EN") == "one "
    assert matcher.feed("D two") == ""
    assert matcher.feed("three") == ""
    assert matcher.finish() == ""
