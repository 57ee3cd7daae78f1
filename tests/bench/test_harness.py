"""The bench's own arithmetic: a wrong median would prove anything."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.bench import report
from tests.bench.__main__ import ROWS, main
from tests.bench.harness import (
    Result,
    Row,
    Sample,
    Sides,
    Span,
    Summary,
    breakdown,
    measure,
    percentile,
    timed,
)
from tests.bench.row_create import bare_objects


@asynccontextmanager
async def _no_sides(_: None) -> AsyncIterator[Sides]:
    yield Sides(timed(_nothing), timed(_nothing))


async def _nothing() -> None:
    """Takes no time worth the name."""


def _row(target: float | None = 0.5, limit: float | None = None) -> Row[None]:
    return Row(
        name="r", ours="us", baseline="them", sides=_no_sides, runs=3, target=target, limit=limit
    )


def _result(ours: Sequence[float], baseline: Sequence[float], **more: Any) -> Result[None]:
    return Result(
        _row(more.pop("target", 0.5), more.pop("limit", None)),
        [*map(Sample, ours)],
        [*map(Sample, baseline)],
        **more,
    )


def test_a_summary_gives_median_least_and_the_nearest_rank_of_95_percent() -> None:
    hundred = [float(n) for n in range(100, 0, -1)]
    assert Summary.of(hundred) == Summary(50.5, 1.0, 95.0)
    assert Summary.of([7.0]) == Summary(7.0, 7.0, 7.0)
    assert percentile([1.0, 2.0, 3.0], 0.95) == 3.0


def test_the_ratio_is_of_medians_and_one_outlier_does_not_move_it() -> None:
    assert _result([1, 1, 900], [4, 4, 4]).ratio == 0.25


@pytest.mark.parametrize(
    ("ours", "target", "verdict"),
    [(1.0, 0.5, "ok"), (2.0, 0.5, "ok"), (2.01, 0.5, "MISS"), (9.0, None, "-")],
)
def test_a_target_is_the_highest_ratio_that_is_good_enough(
    ours: float, target: float | None, verdict: str
) -> None:
    assert _result([ours], [4.0], target=target).verdict == verdict


def test_a_row_without_samples_or_with_a_failure_never_passes() -> None:
    assert _result([], []).verdict == "FAILED"
    assert _result([0.1], [4.0], failure="the pod was gone").verdict == "FAILED"


def test_a_breakdown_is_the_median_of_each_part_where_it_occurs_in_order_of_begin() -> None:
    samples = [
        Sample(9, (Span("b", 3, 5), Span("a", 0, 1))),
        Sample(9, (Span("b", 5, 9), Span("a", 0, 3))),
        Sample(9, (Span("a", 0, 2), Span("only here", 1, 2))),
    ]
    assert breakdown(samples) == [Span("a", 0, 2), Span("only here", 1, 2), Span("b", 4, 7)]


async def test_sides_are_measured_in_turns_and_warmups_are_not_kept() -> None:
    order: list[str] = []

    async def ours() -> Sample:
        order.append("A")
        return Sample(float(order.count("A")))

    async def baseline() -> Sample:
        order.append("B")
        return Sample(10.0 * order.count("B"))

    told: list[str] = []
    mine, other = await measure(
        Sides(ours, baseline), runs=2, warmups=1, tell=told.append, settle=0
    )
    assert "".join(order) == "ABABAB"
    assert [sample.seconds for sample in mine] == [2.0, 3.0]
    assert [sample.seconds for sample in other] == [20.0, 30.0]
    assert told == ["warming up", "run 1 of 2", "run 2 of 2"]


@pytest.mark.parametrize(
    ("runs", "order"), [(4, "AAABBB" + "AAABBB" + "AB"), (3, "AAABBB" + "AAABBB")]
)
async def test_a_burst_is_taken_by_both_sides_alike_and_never_exceeds_the_runs(
    runs: int, order: str
) -> None:
    seen: list[str] = []

    async def ours() -> Sample:
        seen.append("A")
        return Sample(1.0)

    async def baseline() -> Sample:
        seen.append("B")
        return Sample(1.0)

    mine, other = await measure(
        Sides(ours, baseline), runs=runs, warmups=1, burst=3, tell=lambda _: None, settle=0
    )
    assert "".join(seen) == order
    assert (len(mine), len(other)) == (runs, runs)


def test_the_document_keeps_every_sample_and_what_it_was_measured_on() -> None:
    facts = report.document(
        [_result([0.001, 0.003], [0.01, 0.01], load=(0.5, 1.25))],
        datetime(2026, 1, 2, tzinfo=UTC),
        {"kubernetes": "v1.34.4"},
    )
    row = json.loads(json.dumps(facts))["rows"][0]
    assert row["ours"]["samples_ms"] == [1.0, 3.0]
    assert (row["ours"]["median_ms"], row["ratio"], row["verdict"]) == (2.0, 0.2, "ok")
    assert row["load"] == [0.5, 1.25]
    assert facts["versions"]["kubernetes"] == "v1.34.4"
    assert {"date", "cpu_count", "load", "platform"} <= facts.keys()


def test_a_plain_table_names_each_row_with_its_ratio_target_and_verdict() -> None:
    out = io.StringIO()
    report.show([_result([0.004], [0.2]), _result([], [], failure="gone")], out)
    head, first, second = out.getvalue().splitlines()[:3]
    assert head.split()[:5] == ["row", "ours", "ms", "baseline", "ms"]
    assert first.split()[:6] == ["r", "4.0", "200", "0.020", "0.500", "ok"]
    assert second.split()[:6] == ["r", "-", "-", "-", "0.500", "FAILED"]
    assert "gone" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_rows_have_names_of_their_own_and_listing_them_needs_no_cluster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == names


def test_an_unknown_row_is_a_usage_error_that_names_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["nonsense"])
    assert ended.value.code == 2
    assert ROWS[0].name in capsys.readouterr().err


def test_without_a_cluster_there_is_one_clear_error_and_exit_code_4(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("PODPIPE_KUBECTL", "/bin/true")
    assert main(["run"]) == 4
    said = capsys.readouterr()
    assert "scripts/cluster up" in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


def test_the_bare_pod_takes_image_limits_and_rights_of_a_sandbox_and_nothing_else() -> None:
    pod = {
        "metadata": {"namespace": "n", "ownerReferences": ["theirs"]},
        "spec": {
            "securityContext": {"runAsUser": 1000},
            "nodeName": "n1",
            "containers": [
                {
                    "image": "i",
                    "imagePullPolicy": "IfNotPresent",
                    "resources": {"limits": {"cpu": "2"}},
                    "securityContext": {"privileged": False},
                    "command": ["daemon"],
                }
            ],
        },
    }
    claim = {"spec": {"storageClassName": "s", "resources": {}, "volumeName": "theirs"}}
    home, bare = bare_objects("b", "run", pod, claim)
    assert home["spec"] == {"storageClassName": "s", "resources": {}}
    (container,) = bare["spec"]["containers"]
    assert container["command"] == ["sleep", "infinity"]
    assert (container["image"], container["resources"]) == ("i", {"limits": {"cpu": "2"}})
    assert bare["spec"]["securityContext"] == {"runAsUser": 1000}
    assert "theirs" not in json.dumps([home, bare])
    assert "nodeName" not in bare["spec"]
