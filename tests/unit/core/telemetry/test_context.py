"""Which traceparents are followed, and how ours read."""

import pytest

from core.telemetry.context import TraceContext

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("flags, sampled", [("01", True), ("00", False), ("03", True)])
def test_a_callers_context_is_followed_and_reads_the_same_again(flags, sampled):
    context = TraceContext.parse(f"00-{TRACE}-{SPAN}-{flags}")
    assert context == TraceContext(bytes.fromhex(TRACE), bytes.fromhex(SPAN), sampled)
    assert str(context) == f"00-{TRACE}-{SPAN}-{'01' if sampled else '00'}"


def test_a_later_version_may_say_more():
    assert TraceContext.parse(f"01-{TRACE}-{SPAN}-01-what-comes") is not None


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        "",
        "nonsense",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_a_context_that_is_none_is_ignored(wrong):
    assert TraceContext.parse(wrong) is None
