"""The page without a browser: what is drawn of a case and of calls, and that nothing an adapter says is markup."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from fsdpcheck.case import BatchLayout, KernelCase, KernelSpec, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.findings.ranks import Call, RankStood
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.report.document_reader import Errors, Judged
from fsdpcheck.report.page import calls_picture, case_picture, page, plots
from fsdpcheck.report.page.picture import Picture, cut
from tests.common import sessions
from tests.common.tables import each

_FOUND = {"gradient_off_by_1e_12": Errors(12, 12)}
_MISSED = {"gradient_off_by_1e_12": Errors(0, 12)}
POWER = {
    "reference": (
        Judged("plain", "exact", "all laws", 12, 0, {"gradient_off_by": 1e-12}, _FOUND),
        Judged("plain", "exact", "allclose", 12, 0, {"gradient_off_by": 1e-3}, _MISSED),
    )
}


class Reader(HTMLParser):
    """Tags with their attributes, and the text outside of scripts and styles, as a browser reads them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text += data


@each("made", [sessions.mixed, sessions.large, sessions.hostile])
def test_a_page_has_its_own_markup_and_no_other(made: object) -> None:
    """No tag, attribute or script comes from an adapter, and nothing is fetched from anywhere."""
    assert callable(made)
    honest, told = (Reader(page.text([ledger], "", POWER)) for ledger in (sessions.mixed(), made()))
    known = {(tag, name) for tag, attributes in honest.tags for name in attributes}
    assert {(tag, name) for tag, attributes in told.tags for name in attributes} <= known
    assert [tag for tag, _ in told.tags].count("script") == 2
    assert not any(name.startswith("on") or name == "style" for _, attributes in told.tags for name in attributes)
    for tag, attributes in told.tags:
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "#").startswith("#"), tag


def test_a_hostile_adapter_is_told_in_its_own_words() -> None:
    text = page.text([sessions.hostile()])
    assert "onerror=" in Reader(text).text
    assert not re.search(r"<img|<script>document", text)
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_a_page_of_what_is_not_escaped_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from jinja2 import Environment

    class Trusting(Environment):
        def __init__(self, **options: object) -> None:
            super().__init__(**{**options, "autoescape": False})  # type: ignore[arg-type]

    monkeypatch.setattr(page, "Environment", Trusting)
    assert re.search(r"<img|<script>document", page.text([sessions.hostile()]))


def test_a_page_has_the_pictures_of_its_findings_and_survives_what_cannot_be_drawn() -> None:
    titles = "The smallest case. ", "Calls of the run that broke the law. "
    text = page.text([sessions.mixed()])
    assert [text.count(f'aria-label="{title}') for title in titles] == [2, 1]
    huge = sessions.finding(where="sample " + "9" * 9_999, case={"version": 2, "kernel": [[]]})
    broken = Verdict(
        "training.plain", sessions.MINE, "finding", census={"W=" + "9" * 9_999: 1}, finding=huge, exit_code=1
    )
    assert titles[0] not in page.text([sessions.ledger([broken])])


def test_a_session_of_nothing_has_a_page() -> None:
    assert "Nothing else is known" in page.text([sessions.ledger([], unaccepted={})])


def _shown(picture: Picture, look: str) -> list[str]:
    return [shape.told for shape in picture.shapes if look in str(shape.attributes["class"]).split()]


def _texts(picture: Picture) -> list[str]:
    return [shape.text for shape in picture.shapes if shape.tag == "text"]


def test_a_case_is_drawn_with_samples_shards_and_padding() -> None:
    """3 rows on 2 ranks: two rows, and one with one of padding. 4 samples on rank 0 in two micro-batches."""
    picture = case_picture.of_case(sessions.CASE, [1], "step 0, rank 1, units.0.linear0.bias[2]; sample 3 of 4")
    assert _shown(picture, "chip") == ["sample 0", "sample 1", "sample 2", "sample 3"]
    assert _shown(picture, "bad")[1:] == ["sample 3", "units.0.linear0.bias"]
    assert len(_shown(picture, "empty")) == 2
    of_one = ["rows 0-1", "rows 0-1", "row 2, 1 of padding"]
    assert (_shown(picture, "shard"), _shown(picture, "padding")) == (of_one * 2, ["row 2, 1 of padding"] * 2)
    assert _texts(picture)[:3] == ["rank 0", "rank 1", "micro-batch 0"]
    (mark,) = (shape for shape in picture.shapes if shape.attributes["class"] == "mark")
    of_rank = next(float(shape.attributes["x"]) for shape in picture.shapes if shape.text == "rank 1")
    assert float(mark.attributes["x"]) < of_rank < float(mark.attributes["x"]) + float(mark.attributes["width"])


def test_samples_that_occur_twice_are_marked() -> None:
    case = dataclasses.replace(sessions.CASE, layout=BatchLayout("sampler", 3), step=StepSpec())
    picture = case_picture.of_case(case)
    assert _shown(picture, "again") == ["sample 0, 2 times in the batch"] * 2


def test_a_replica_has_the_shards_of_the_other() -> None:
    case = TrainingCase(ModelSpec((LayerSpec(4),)), MeshSpec(2, 2), BatchLayout("contiguous", 4))
    assert _shown(case_picture.of_case(case), "shard") == ["rows 0-1", "rows 0-1", "rows 2-3", "rows 2-3"] * 2


def test_large_cases_are_cut_and_say_so() -> None:
    case = TrainingCase(ModelSpec((LayerSpec(40),) * 12), MeshSpec(16), BatchLayout("contiguous", 400))
    picture = case_picture.of_case(case)
    assert len(picture.shapes) < 1_000
    for said in ("and 4 more", "and 17 more", "and 4 parameters more"):
        assert said in _texts(picture)


def test_a_case_that_trains_nothing_and_one_of_another_release_are_told_in_words_alone() -> None:
    for case in ({"version": 99}, {}, KernelCase(KernelSpec()).to_json()):
        other = {"version": 2} if isinstance(case, str) else case
        assert case_picture.drawn(sessions.finding(case=other)) is None


def _call(name: str, op: str = "all_reduce", members: tuple[int, ...] = (0, 1)) -> Call:
    return Call(name, op, op, members)


def test_calls_are_drawn_with_who_waits_for_whom() -> None:
    picture = calls_picture.drawn(sessions.RANKS)
    assert picture is not None
    assert _shown(picture, "never") == ["rank 1 never came; rank 0 waits for it"]
    assert _shown(picture, "call") == ["all_reduce(float64[3, 2]) sum #0, at /home/me/project/train.py:30"]
    assert picture.told == "rank 0 is blocked in all_reduce and waits for rank 1; rank 1: finished, 0 calls"
    assert calls_picture.drawn((RankStood(0, "finished"),)) is None


def test_one_call_is_one_column_and_calls_of_others_stand_beside_it() -> None:
    both, mine, yours = _call("both"), _call("mine", "barrier", (0,)), _call("yours", "barrier", (1,))
    ranks = (RankStood(0, "finished", calls=(mine, both)), RankStood(1, "finished", calls=(yours, yours, both)))
    picture = calls_picture.drawn(ranks)
    assert picture is not None
    places = [float(shape.attributes["x"]) for shape in picture.shapes if shape.attributes["class"] == "call"]
    assert places[0] == places[2] < places[1] == places[4]


def test_calls_that_disagree_are_marked() -> None:
    ranks = (RankStood(0, "finished", calls=(_call("a"),)), RankStood(1, "finished", calls=(_call("a", "barrier"),)))
    picture = calls_picture.drawn(ranks)
    assert picture is not None
    assert len(_shown(picture, "odd")) == 2
    crossed = (_call("a"), _call("b")), (_call("b"), _call("a"))
    assert calls_picture.drawn(tuple(RankStood(n, "finished", calls=own) for n, own in enumerate(crossed))) is not None


def test_many_calls_are_short_and_the_legend_names_them() -> None:
    calls = tuple(_call(str(number), "all_gather_into_tensor" if number % 2 else "frobnicate") for number in range(12))
    ranks = (RankStood(0, "finished", calls=calls),)
    picture = calls_picture.drawn(ranks)
    assert picture is not None
    assert calls_picture.legend(ranks) == {"F": "frobnicate", "AG": "all_gather_into_tensor"}
    assert _texts(picture).count("AG") == 6
    assert calls_picture.legend(ranks[:0]) == {}


def test_a_history_counts_each_session_and_names_what_changed() -> None:
    then, now = sessions.large(broken=0), sessions.large()
    changed = [(ref, law) for ref, law, _ in plots.changes([then, now])]
    found = {(one.adapter, one.law) for one in now.findings}
    assert set(changed) == found
    assert all(words[1] == "finding" for *_, words in plots.changes([then, now]))
    assert "12 with a finding" in plots.history([then, now]).told
    assert [*plots.changes([now, now])] == []


def test_power_is_drawn_from_left_to_right_by_size() -> None:
    picture = plots.power(POWER["reference"])
    ours, theirs = (float(shape.attributes["cx"]) for shape in picture.shapes if shape.tag == "circle")
    assert ours < theirs
    assert "all laws finds gradient off by of 1e-12" in picture.told
    silent = dataclasses.replace(POWER["reference"][0], smallest={})
    assert _texts(plots.power([silent])) == ["no graded error is always found"]


@pytest.mark.parametrize(
    ("got", "wanted", "found"),
    [
        ("1.25", "1.75", (("1.", "2", "5"), ("1.", "7", "5"))),
        ("same", "same", (("same", "", ""), ("same", "", ""))),
        ("aa", "aaa", (("aa", "", ""), ("aa", "a", ""))),
        ("a\nb", "a", (("", "a\nb", ""), ("", "a", ""))),
    ],
)
def test_what_differs_between_two_values_is_marked(
    got: str, wanted: str, found: tuple[tuple[str, str, str], tuple[str, str, str]]
) -> None:
    assert page.apart(got, wanted) == found


def test_a_long_text_is_cut_in_its_middle() -> None:
    assert [cut("abcdefgh", most) for most in (8, 5, 3)] == ["abcdefgh", "ab…gh", "a…h"]
