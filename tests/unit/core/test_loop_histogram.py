"""The histogram of every token gives what the library's would."""

from prometheus_client import CollectorRegistry, Histogram

from core.metrics.loop_histogram import LoopHistograms

BOUNDS = (0.01, 0.1, 1.0)


def _samples(registry: CollectorRegistry) -> dict[tuple[str, str | None], float]:
    return {
        (sample.name, sample.labels.get("le")): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_it_counts_and_sums_as_the_librarys_own():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    family = LoopHistograms("h", "words", ("model_name",), BOUNDS)
    ours.register(family)
    fast = family.labels("m")
    slow = Histogram("h", "words", ("model_name",), buckets=BOUNDS, registry=theirs).labels("m")
    for value in (0.005, 0.01, 0.05, 0.5, 2.0):
        fast.observe(value)
        slow.observe(value)
    fast.observe(0.02, 3)
    for _ in range(3):
        slow.observe(0.02)
    mine, wanted = _samples(ours), _samples(theirs)
    assert mine.keys() == wanted.keys()
    assert all(abs(mine[key] - wanted[key]) < 1e-12 for key in wanted)
    assert fast.count == 8


def test_each_value_of_a_label_has_its_own_in_one_family():
    registry = CollectorRegistry()
    family = LoopHistograms("h", "words", ("model_name",), BOUNDS)
    registry.register(family)
    family.labels("m").observe(0.05)
    family.labels("n").observe(0.05, 2)
    assert family.labels("m") is family.labels("m")
    assert registry.get_sample_value("h_count", {"model_name": "m"}) == 1
    assert registry.get_sample_value("h_count", {"model_name": "n"}) == 2
