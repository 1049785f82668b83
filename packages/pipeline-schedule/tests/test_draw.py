"""The drawings: what stands where in the text, the SVG, the PNG and the trace."""

from __future__ import annotations

import itertools
import json
import struct
import xml.etree.ElementTree as ElementTree
from fractions import Fraction
from pathlib import Path

import pytest
from pipeline_schedule import (
    Costs,
    Timeline,
    as_report,
    as_svg,
    as_text,
    as_trace,
    generate,
    interleaved_1f1b,
    one_f_one_b,
    overlap_b_f,
    save_png,
    simulate,
    zb_h1,
    zb_v,
)

SVG = "{http://www.w3.org/2000/svg}"


def test_text_of_1f1b() -> None:
    assert as_text(simulate(one_f_one_b(2, 3))) == (
        "rank 0  F0 F1       B0--- F2 B1---    B2---\n"
        "rank 1     F0 B0--- F1 B1--- F2 B2---"
    )  # fmt: skip


def test_text_of_halves_and_chunks() -> None:
    assert as_text(simulate(zb_h1(2, 2))) == "rank 0  F0 F1    I0 W0 I1 W1\nrank 1     F0 I0 F1 I1 W0 W1"
    assert as_text(simulate(zb_v(1, 1))) == "rank 0  F0a F0b I0b W0b I0a W0a"


def test_text_of_an_overlapping_pair() -> None:
    text = as_text(simulate(overlap_b_f(interleaved_1f1b(1, 1, 2))))
    assert text == "rank 0  F0 B0F1---- B1---"


def test_text_goes_on_below() -> None:
    text = as_text(simulate(one_f_one_b(3, 12)), width=60)
    blocks = text.split("\n\n")
    assert len(blocks) == 4
    assert all(len(line) <= 60 for line in text.splitlines())
    assert [block.count("\n") for block in blocks] == [2] * 4


def test_text_of_uneven_times() -> None:
    """A unit is the shortest computation, here a half: columns for its name and a space."""
    text = as_text(simulate(one_f_one_b(1, 2), Costs(forward=Fraction(1, 2), backward_input=1, backward_weight=0.5)))
    assert text == "rank 0  F0 B0------ F1 B1------"


def test_report() -> None:
    assert as_report(simulate(interleaved_1f1b(2, 2, 2))).splitlines() == [
        "Interleaved 1F1B: 2 ranks x 2 chunks, 2 micro-batches",
        "",
        "rank 0  F0a F1a F0b F1b         B0b----     B1b---- B0a---- B1a----",
        "rank 1      F0a F1a F0b B0b---- F1b B1b---- B0a---- B1a----",
        "",
        "F forward, B backward; then the micro-batch, then the chunk as a letter.",
        "",
        "rank     idle  peak activations  virtual stages",
        "   0   20.0 %                 4  0 2",
        "   1   20.0 %                 3  1 3",
        "",
        "makespan 15",
    ]


def test_report_leaves_out_charts_that_are_too_long() -> None:
    report = as_report(simulate(interleaved_1f1b(8, 4, 32)), max_lines=20)
    assert "is left out; draw it as a picture or a trace" in report
    assert "rank 0  F0" not in report
    assert len(report.splitlines()) < 20


def test_width_too_small() -> None:
    with pytest.raises(ValueError, match="width = 10 must be at least 40 columns"):
        as_text(simulate(one_f_one_b(1, 1)), width=10)


def bars_of(svg: ElementTree.Element) -> list[ElementTree.Element]:
    return [rect for rect in svg.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]


def test_svg() -> None:
    timeline = simulate(zb_v(4, 8), Costs(communication=Fraction(1, 4)))
    svg = ElementTree.fromstring(as_svg(timeline))
    bars = bars_of(svg)
    assert len(bars) == 4 * 8 * 2 * 3
    titles = {bar[0].text for bar in bars}
    assert "forward(stage 0, micro-batch 0), 0 to 1" in titles
    assert len(list(svg.iter(f"{SVG}polyline"))) == len(timeline.transfers) == 2 * 6 * 8
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    assert "ZB-V: 4 ranks x 2 chunks, 8 micro-batches" in texts
    assert "rank 3" in texts
    width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
    for bar in bars:
        assert 0 <= float(bar.attrib["x"]) <= float(bar.attrib["x"]) + float(bar.attrib["width"]) <= width
        assert 0 <= float(bar.attrib["y"]) <= height


def test_svg_bars_do_not_lie_on_each_other() -> None:
    for schedule in (interleaved_1f1b(3, 2, 5), overlap_b_f(interleaved_1f1b(3, 2, 5))):
        rows: dict[str, list[tuple[float, float]]] = {}
        for bar in bars_of(ElementTree.fromstring(as_svg(simulate(schedule)))):
            x = float(bar.attrib["x"])
            rows.setdefault(bar.attrib["y"], []).append((x, x + float(bar.attrib["width"])))
        for spans in rows.values():
            spans.sort()
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize("timeline", [simulate(zb_v(3, 4)), simulate(overlap_b_f(interleaved_1f1b(4, 2, 8)))])
def test_png(timeline: Timeline, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'pipeline-schedule[plot]' to test PNG drawings")
    path = tmp_path / "chart.png"
    save_png(timeline, path, dots_per_inch=50)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width == 650
    assert height == round(50 * (1.6 + 0.36 * timeline.schedule.num_ranks))


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zbv"])
def test_trace(name: str) -> None:
    timeline = simulate(generate(name, 3, 4), Costs(communication=1))
    trace = json.loads(json.dumps(as_trace(timeline, microseconds_per_unit=10)))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == 0]
    times = sorted((event["pid"], event["ts"], event["dur"]) for event in spans)
    expected = sorted(
        (rank, 10.0 * float(span.start), 10.0 * float(span.end - span.start))
        for rank, computations in enumerate(timeline.computations)
        for span in computations
    )
    assert times == expected
    arrows = [event for event in trace["traceEvents"] if event["ph"] in "sf"]
    assert len(arrows) == 2 * len(timeline.transfers)
    assert {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
        "rank 2",
    }


def test_trace_of_pairs_uses_a_second_thread() -> None:
    trace = as_trace(simulate(overlap_b_f(interleaved_1f1b(2, 2, 4))))
    beside = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == 2]
    assert beside
    assert {event["cat"] for event in beside} == {"forward"}


def test_trace_scale() -> None:
    with pytest.raises(ValueError, match="microseconds_per_unit = 0 must be above 0"):
        as_trace(simulate(one_f_one_b(1, 1)), microseconds_per_unit=0)
