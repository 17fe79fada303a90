"""The page in a real browser: wide and narrow, light and dark, by keyboard, for contrast, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from fsdpcheck.report.page import page as pages
from tests.common import browser, sessions
from tests.common.browser import Page
from tests.report.test_page import POWER

pytestmark = pytest.mark.skipif(browser.found() is None, reason=f"no browser here: none of {', '.join(browser.NAMES)}")

SIZES: Final = {"desktop": (1280, 900), "phone": (390, 844), "small phone": (320, 568)}

CONTRAST: Final = """(() => {
  const numbers = (color) => (color.match(/[\\d.]+/g) || []).map(Number);
  const clear = (color) => ['none', 'transparent'].includes(color) || numbers(color)[3] === 0;
  const light = (color) => numbers(color).slice(0, 3).map((one) => one / 255)
    .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    .reduce((sum, one, place) => sum + one * [0.2126, 0.7152, 0.0722][place], 0);
  const behind = (node, x, y) => {
    if (node.ownerSVGElement) {
      for (const other of document.elementsFromPoint(x, y)) {
        if (other === node || other.tagName === 'text' || other.tagName === 'title') continue;
        if (!other.ownerSVGElement) break;
        const fill = getComputedStyle(other).fill;
        if (other.tagName === 'rect' && !clear(fill)) return fill;
      }
    }
    for (let at = node.ownerSVGElement || node; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (!clear(color)) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || ['SCRIPT', 'STYLE', 'title'].includes(node.tagName)) continue;
    const range = document.createRange();
    range.selectNodeContents(walker.currentNode);
    const box = range.getBoundingClientRect();
    if (!node.checkVisibility() || !box.width || node.closest('.hidden, .skip')) continue;
    const style = getComputedStyle(node);
    const front = node.ownerSVGElement ? style.fill : style.color;
    const back = behind(node, box.x + box.width / 2, box.y + box.height / 2);
    const [one, other] = [light(front), light(back)].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    found.push([(one + 0.05) / (other + 0.05) / (large ? 3 : 4.5), walker.currentNode.data.trim().slice(0, 40), front]);
  }
  return found;
})()"""
"""[contrast over what WCAG 2.2 AA asks of text so large (1.4.3), the text, its colour] of each text that is seen."""

FOCUSED: Final = "(document.activeElement.id || document.activeElement.className || document.activeElement.tagName)"


@pytest.fixture(scope="module")
def window() -> Iterator[Page]:
    path = browser.found()
    assert path is not None
    with browser.browser(path) as page:
        yield page


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages: of each kind of verdict, of 119 laws on 4 adapters with a history and power, of a hostile adapter."""
    folder = tmp_path_factory.mktemp("pages")
    history = [sessions.large(at=f"2026-11-{day}T08:00+00:00", broken=day % 2) for day in (18, 19, 20, 21)]
    made = {
        "mixed": pages.text([sessions.mixed()]),
        "large": pages.text(history, "", POWER),
        "hostile": pages.text([sessions.hostile()]),
    }
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


def told(window: Page, *methods: str) -> list[Any]:
    return [event["params"] for event in window.events if event.get("method") in methods]


@pytest.mark.parametrize("name", ["mixed", "large", "hostile"])
@pytest.mark.parametrize("size", list(SIZES))
def test_a_page_fits_its_window_says_no_error_and_fetches_nothing(
    window: Page, files: dict[str, Path], name: str, size: str
) -> None:
    width, height = SIZES[size]
    window.open(files[name], width, height)
    window.tell("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    wide = "[...document.querySelectorAll('main *')].filter((one) => !one.closest('.scroll') && !one.closest('.hidden')"
    beyond = f"{wide} && one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML.slice(0, 80))"
    assert window.tell("document.documentElement.scrollWidth - innerWidth") <= 0
    assert window.tell(beyond) == []
    assert told(window, "Runtime.exceptionThrown", "Log.entryAdded") == []
    fetched = [one["request"]["url"] for one in told(window, "Network.requestWillBeSent")]
    assert fetched == [files[name].absolute().as_uri()]


def test_a_page_that_is_too_wide_or_fetches_is_noticed(window: Page, files: dict[str, Path], tmp_path: Path) -> None:
    text = files["mixed"].read_text(encoding="utf-8")
    wide = '<main id="main"><svg width="2000" height="9"></svg><img src="x.png">'
    (tmp_path / "wide.html").write_text(text.replace('<main id="main"', f'{wide}<p class="rest"'), encoding="utf-8")
    window.open(tmp_path / "wide.html", *SIZES["phone"])
    assert window.tell("document.documentElement.scrollWidth - innerWidth") > 0
    assert told(window, "Log.entryAdded"), "the page's policy blocks the image, and says so"


@pytest.mark.parametrize("name", ["mixed", "large"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_the_contrast_that_wcag_asks(window: Page, files: dict[str, Path], name: str, scheme: str) -> None:
    window.open(files[name], *SIZES["desktop"], scheme)
    window.tell("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    window.resize(1280, window.tell("document.documentElement.scrollHeight"))
    window.tell("document.querySelector('button.cell.bad').click()")
    found = window.tell(CONTRAST)
    assert len(found) > 100
    assert [one for one in found if one[0] < 1] == []


def test_text_that_is_too_pale_is_noticed(window: Page, files: dict[str, Path]) -> None:
    window.open(files["mixed"], *SIZES["desktop"])
    window.resize(1280, window.tell("document.documentElement.scrollHeight"))
    window.tell("document.documentElement.style.setProperty('--muted', '#a0a0a0')")
    window.tell("document.documentElement.style.setProperty('--chip-ink', '#c0c0ff')")
    pale = {one[1] for one in window.tell(CONTRAST) if one[0] < 1}
    assert {"The guarantee of training.plain.", "micro-batch 0", "0"} <= pale


def test_the_page_is_used_by_keyboard_alone(window: Page, files: dict[str, Path]) -> None:
    window.open(files["large"], *SIZES["desktop"])
    window.press("Tab")
    assert window.tell(FOCUSED) == "skip"
    seen, ringless = [], []
    while (at := window.tell(FOCUSED)) != "BODY" and len(seen) < 300:
        seen.append(at)
        ring = window.tell("getComputedStyle(document.activeElement).outlineStyle")
        ringless += [at] if ring == "none" else []
        window.press("Tab")
    assert ringless == []
    assert {"skip", "theme", "A", "copy", "filter", "unfold", "SUMMARY"} <= set(seen)
    assert sum(one.startswith("cell") for one in seen) == 1, "one stop for all cells; arrows move between them"


def test_arrows_move_between_checks_and_escape_comes_back(window: Page, files: dict[str, Path]) -> None:
    window.open(files["large"], *SIZES["desktop"])
    name = "document.activeElement.getAttribute('aria-label')"
    window.tell("document.querySelector('button.cell').focus()")
    first = window.tell(name)
    assert first.startswith("chapter00.law-0 on train.py:MyAdapter: finding")
    walked = []
    for key in ("ArrowRight", "ArrowDown", "End", "Home", "ArrowUp", "ArrowLeft"):
        window.press(key)
        walked.append(window.tell(name).partition(":")[0])
    assert walked == [
        "chapter00.law-0 on package1.implementation",
        "chapter00.law-102 on package1.implementation",
        "chapter00.law-102 on package3.implementation",
        "chapter00.law-102 on train.py",
        "chapter00.law-0 on train.py",
        "chapter00.law-0 on train.py",
    ]
    window.press("Enter")
    more = "document.querySelector('#more')"
    assert not window.tell(f"{more}.hidden")
    assert "the run did not complete" in window.tell(f"{more}.textContent")
    window.press("ArrowRight")
    assert "package1" in window.tell(f"{more}.textContent")
    window.press("Escape")
    assert window.tell(f"{more}.hidden")
    assert "package1" in window.tell(name)


def test_a_chapter_is_opened_by_a_key_and_laws_are_found_by_name(window: Page, files: dict[str, Path]) -> None:
    window.open(files["large"], *SIZES["desktop"])
    closed = "[...document.querySelectorAll('.matrix details')].filter((one) => !one.open).length"
    before = window.tell(closed)
    assert before > 0
    window.tell("document.querySelector('.matrix details:not([open]) summary').focus()")
    window.press("Enter")
    assert window.tell(closed) == before - 1
    window.tell("document.querySelector('#filter').focus()")
    window.press(*"law-102")
    rows = "[...document.querySelectorAll('.matrix tbody tr')].filter((one) => one.checkVisibility()).length"
    assert (window.tell(rows), window.tell("document.querySelector('#matches').textContent")) == (1, "1 law")


def test_nothing_that_an_adapter_says_runs(window: Page, files: dict[str, Path]) -> None:
    window.open(files["hostile"], *SIZES["desktop"])
    assert window.tell("document.title") == "A law is broken · fsdpcheck" or "fsdpcheck" in window.tell(
        "document.title"
    )
    assert window.tell("document.querySelectorAll('img, iframe, object, embed, link').length") == 0
    assert "onerror=" in window.tell("document.body.innerText")
    added = "(() => { const one = document.createElement('script'); one.textContent = 'window.taken = 1';"
    assert window.tell(f"{added} document.body.append(one); return window.taken === undefined; }})()")


def test_without_scripts_all_of_it_is_there(window: Page, files: dict[str, Path]) -> None:
    window.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        window.open(files["large"], *SIZES["desktop"])
        assert window.tell("document.querySelectorAll('.matrix button.cell').length") == 4 * 119
        shown = "filter((one) => one.checkVisibility() && !one.closest('td'))"
        dead = f"[...document.querySelectorAll('button, input')].{shown}"
        assert window.tell(f"{dead}.length") == 0, "nothing is shown that does nothing"
    finally:
        window.send("Emulation.setScriptExecutionDisabled", value=False)
