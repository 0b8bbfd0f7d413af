"""The page in headless Chromium: by keyboard alone, its colours, nothing from elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time

import numpy as np
import pytest

from dflash_jax.decode.sampling import Sampling
from dflash_jax.engine import RoundRecord
from dflash_jax.engine.lone import STOP
from dflash_jax.engine.turns import Drivers
from dflash_jax.tree.growth import EMPTY
from tests.serve import tiny_server

selenium = pytest.importorskip("selenium", reason="selenium is not installed")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_S = 60
MARKUP = '<img src=x onerror="document.title=1"><script>document.title=2</script>&amp;'


@pytest.fixture(scope="module")
def chromium():
    binary = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    chromedriver = shutil.which("chromedriver")
    if binary is None or chromedriver is None:
        pytest.skip("no browser: install Debian's chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    options.add_argument("--headless=new")
    options.add_argument("--disable-dev-shm-usage")
    if os.getuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium refuses root with it
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(chromedriver))
    driver.set_window_size(1200, 900)
    yield driver
    driver.quit()


class Page:
    """The page of a server, as somebody at a keyboard has it."""

    def __init__(self, driver, url: str) -> None:
        self.driver, self.url = driver, url
        driver.get_log("browser")  # earlier pages'
        driver.get(url)

    def find(self, selector: str):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.driver.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent).join('')",
            selector,
        )

    def wait(self, condition, what: str) -> None:
        WebDriverWait(self.driver, WAIT_S, 0.05).until(lambda _: condition(), what)

    def ready(self) -> None:
        self.wait(lambda: self.find("#send:enabled"), "ready")

    def press(self, *keys: str) -> None:
        """Keys go wherever the focus is."""
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def say(self, text: str) -> None:
        """Sends a message and waits for the end of its reply."""
        count = len(self.find("article.assistant footer"))
        self.press(text, Keys.ENTER)
        self.wait(
            lambda: (
                len(self.find("article.assistant")) > count
                and not self.find("[aria-busy]")
                and self.find("#send:enabled")
            ),
            "reply",
        )

    def set(self, name: str, value: str) -> None:
        field = self.driver.find_element(By.ID, name)
        field.clear()
        field.send_keys(value)
        self.driver.find_element(By.ID, "message").click()

    def messages(self) -> list[dict]:
        return self.driver.execute_script("return messages")

    def check_quiet(self) -> None:
        """Nothing from elsewhere, no cookie, nothing that the browser complains about."""
        addresses = self.driver.execute_script(
            "return performance.getEntriesByType('resource').map(entry => entry.name)"
        )
        assert addresses
        assert all(address.startswith(f"{self.url}/") for address in addresses)
        assert self.driver.execute_script("return document.cookie") == ""
        wrong = [line for line in self.driver.get_log("browser") if line["level"] == "SEVERE"]
        assert wrong == []


@contextlib.contextmanager
def opened(chromium, **settings):
    with tiny_server.running(**settings) as server:
        page = Page(chromium, server.url)
        page.ready()
        yield page, server
        chromium.get("about:blank")


class Scripted:
    """A driver whose replies are rounds of given texts: what landed, then the target's own."""

    def __init__(self, driver, rounds: list[tuple[str, str]]) -> None:
        self._driver, self._rounds = driver, rounds
        self.finish_reason = None

    def __getattr__(self, name: str):
        return getattr(self._driver, name)

    def stream(self, request):
        del request
        return contextlib.nullcontext(self)

    def rounds(self, interrupted):
        del interrupted
        self.finish_reason = None
        context = 0
        for landed, own in self._rounds:
            encode = tiny_server.tokenizer().encode
            tokens = tuple(token for character in landed + own for token in encode(character))
            flags = np.ones(len(landed), bool)
            why = {"prices_ms": [20.0, 21.0, 22.0, 24.0]} if context else {}
            yield RoundRecord(
                tokens, context, len(landed), EMPTY, np.zeros(0), flags, 25.0, 0.1, True, why=why
            )
            context += 9 + len(tokens)
        self.finish_reason = STOP


def scripted(rounds: list[tuple[str, str]], **changes):
    """A model for `tiny_server.running`."""
    served = tiny_server.model()
    drivers = Drivers(*(Scripted(driver, rounds) for driver in served.drivers))
    model = dataclasses.replace(served, drivers=drivers, **changes)
    return lambda say: model


def test_a_chat_by_keyboard_alone(chromium):
    with opened(chromium) as (page, _):
        assert "tiny, 400 tokens of context" in page.text("#model")
        page.set("temperature", "0")
        page.set("max-tokens", "30")
        page.say("hello")
        page.press("wor")
        keys = webdriver.ActionChains(page.driver)
        keys.key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()
        page.say("ld")
        chat = page.messages()
        assert [turn["role"] for turn in chat] == ["user", "assistant"] * 2
        assert chat[2]["content"] == "wor\nld"
        for end in (1, 3):
            prompt = tiny_server.tokenizer().encode_chat(chat[:end])
            text, reason, digest = tiny_server.alone(prompt, Sampling(), 30)
            assert chat[end]["content"] == text
            footer = page.find("article.assistant footer")[end // 2].text
            assert footer.startswith(reason)
            assert digest[:12] in footer
        assert page.text("article.assistant .text") == chat[1]["content"] + chat[3]["content"]
        assert float(page.text("#rate")) > 0
        assert page.text("#tokens") == "30"
        page.check_quiet()


def test_every_control_is_reached_and_used_by_keyboard(chromium):
    with opened(chromium) as (page, _):
        seen = []
        for _ in range(12):
            seen.append(page.driver.switch_to.active_element.get_attribute("id"))
            page.press(Keys.TAB)
        wanted = ["message", "send", "rule", "temperature", "max-tokens", "draft", "clear"]
        assert [name for name in seen if name in wanted][: len(wanted)] == wanted
        for field in page.find("input, select, textarea"):
            assert page.driver.execute_script("return arguments[0].labels.length", field) == 1


def test_tokens_are_coloured_by_how_they_came(chromium):
    rounds = [("", "T"), ("he ", "c"), ("", "a"), ("t i", "s")]
    with opened(chromium, load=scripted(rounds)) as (page, _):
        page.say("hello")
        assert page.text("article.assistant .text") == "The cat is"
        assert page.text("article .drafted") == "he t i"
        assert page.text("article .own") == "Tcas"
        assert page.find("article .drafted")[0].get_attribute("title").endswith("width 3")
        assert page.text("#tokens") == "10"
        assert page.text("#drafted") == "6"
        assert page.text("#rate") == f"{1000 * 9 / 75:.1f}"
        assert page.text("#plain-rate") == "50.0"
        assert page.text("#ratio") == f"{1000 * 9 / 75 / 50:.2f} ×"
        assert page.text("#per-round") == "3.00"
        assert page.text("#mean-width") == "2.0"
        rows = [row.text.split() for row in page.find("#widths tr")]
        assert rows[0] == ["0", "20.0", "25.0", "1"]
        assert rows[1] == ["1", "21.0"]
        assert rows[3] == ["3", "24.0", "25.0", "2"]
        assert len(page.find("#rounds div")) == 3


def test_markup_stays_text(chromium):
    rounds = [("", "."), (MARKUP, "."), ("</span></div>", ".")]
    with opened(chromium, load=scripted(rounds, name=MARKUP)) as (page, _):
        title = page.driver.title
        page.say(MARKUP)
        assert page.text("article.user .text") == MARKUP
        assert page.text("article.assistant .text") == f".{MARKUP}.</span></div>."
        assert page.text("#model").startswith(MARKUP)
        assert not page.find("img, article script")
        assert page.driver.title == title
        page.check_quiet()


def test_the_same_request_plain_has_the_same_tokens(chromium):
    with opened(chromium) as (page, _):
        page.set("max-tokens", "25")
        page.say("hello world")
        assert page.text("#plain-source") == "priced"
        page.find("button.again")[0].send_keys(Keys.ENTER)
        page.wait(lambda: "the same tokens" in page.text(".plain-result"), "plain result")
        assert page.text("#plain-source") == "measured"
        assert float(page.text("#plain-rate")) > 0
        assert not page.find("button.again")
        page.check_quiet()


def test_the_rule_is_switched_by_keyboard(chromium):
    with opened(chromium) as (page, server):
        before = server.http.get("/rule").json()["rule"]
        choice = Select(page.driver.find_element(By.ID, "rule"))
        assert choice.first_selected_option.text == before
        assert "fixed:3" in [option.text for option in choice.options]
        page.driver.find_element(By.ID, "rule").send_keys("fixed:3")
        page.wait(lambda: "fixed:3" in page.text("#status"), "status")
        assert server.http.get("/rule").json()["rule"] == "fixed:3"
        page.driver.find_element(By.ID, "message").click()
        page.set("max-tokens", "20")
        page.say("hello world")
        assert page.text("#mean-width") == "3.0"
        server.http.put("/rule", json={"rule": before})
        page.check_quiet()


@pytest.mark.parametrize("how", ["escape", "button"])
def test_a_reply_can_be_stopped(chromium, how):
    with opened(chromium, slow=0.05) as (page, server):
        page.set("max-tokens", "300")
        page.set("temperature", "0")
        page.press("hello world", Keys.ENTER)
        page.wait(lambda: len(page.find("article .own")) > 2, "first tokens")
        if how == "escape":
            page.press(Keys.ESCAPE)
        else:
            page.find("#stop")[0].send_keys(Keys.ENTER)
        page.wait(lambda: "stopped" in page.text("article footer"), "stopped")
        assert server.idle()
        page.set("max-tokens", "5")
        page.say("again")  # the chat goes on
        assert len(page.messages()) == 4
        page.check_quiet()


def test_errors_are_shown_as_text_and_the_chat_goes_on(chromium):
    with opened(chromium, max_prompt_tokens=100) as (page, _):
        page.set("max-tokens", "5")
        page.say("x" * 200)
        assert "at most 100" in page.text("article.error")
        assert "at most 100" in page.text("#status")
        page.say("hello")
        assert page.messages()[0]["content"] == "hello"


def test_a_server_with_a_key_and_one_that_is_not_ready(chromium):
    held = []

    def load(say):
        say("3 of 9 programs ready")
        while not held:
            time.sleep(0.01)
        return tiny_server.model()

    with tiny_server.running(load=load, api_key=tiny_server.KEY) as server:
        page = Page(chromium, server.url)
        page.wait(lambda: "3 of 9 programs ready" in page.text("#model"), "progress")
        held.append(True)
        page.wait(lambda: page.find("#key-field:not([hidden])"), "the key's field")
        assert "API key" in page.text("#model")
        assert not page.find("#send:enabled")
        page.find("#key")[0].send_keys(tiny_server.KEY, Keys.TAB)
        page.ready()
        page.set("max-tokens", "5")
        page.say("hello")
        assert "token_sha256" in page.text("article footer")
        chromium.get("about:blank")


CONTRAST = """
const luminance = (colour) => {
  const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((x) => x / 255)
    .map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (one) => {
  for (; one; one = one.parentElement) {
    const colour = getComputedStyle(one).backgroundColor;
    if (!/, 0\\)$/.test(colour)) return colour;
  }
};
return [...document.querySelectorAll('body *')].filter((one) => one.checkVisibility()
  && [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
  .map((one) => {
    const [a, b] = [getComputedStyle(one).color, behind(one)].map(luminance);
    return [one.className || one.tagName, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
  });
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_dark(chromium, scheme):
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        rounds = [("", "T"), ("he ", "c")]
        with opened(chromium, load=scripted(rounds)) as (page, _):
            page.say("hello")
            found = dict(chromium.execute_script(CONTRAST))
            assert {"drafted", "own"} <= set(found)
            # Disabled controls are exempt (WCAG 2.2, 1.4.3).
            low = {name: ratio for name, ratio in found.items() if ratio < 4.5}
            assert not low
            colour = chromium.execute_script("return getComputedStyle(document.body).color")
            assert (colour == "rgb(28, 28, 26)") == (scheme == "light")
    finally:
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_narrow_screen_needs_no_sideways_scrolling(chromium):
    chromium.set_window_size(500, 800)
    try:
        with opened(chromium, load=scripted([("", "T"), ("x" * 15, "y" * 400)])) as (page, _):
            page.say("hello" * 60)
            wide = "return document.documentElement.scrollWidth - window.innerWidth"
            assert chromium.execute_script(wide) <= 0
    finally:
        chromium.set_window_size(1200, 900)
