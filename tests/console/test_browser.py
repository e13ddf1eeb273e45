"""The console in a browser, by what people do with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.keys import KeyFile
from support.mock_llm import write_mock_llm
from support.model_files import write_identity
from support.serving import RunningServer, running_server
from support.tools import tool

from modelserver.auth.api_keys import SCOPES, Scope

pytestmark = [pytest.mark.tool("chromium", "playwright"), pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parent.parent.parent
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
PAGES = ("models", "models/identity", "models/broken", "chat", "charts", "logs", "traces")
# Not a page's fault: the browser logs each answer of 400 and above.
STATUS = re.compile(r"Failed to load resource: the server responded with a status of")


@pytest.fixture(scope="module")
def served(model_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Models of several kinds, one of which cannot be loaded and says so in HTML."""
    root = tmp_path_factory.mktemp("models")
    for name in ("tiny_chat", "digits_onnx", "digits_versions_all"):
        (root / name).symlink_to(model_repository / name)
    write_identity(root)
    write_identity(root, "idle")
    write_mock_llm(root, "mock")
    (root / "broken" / "1").mkdir(parents=True)
    (root / "broken" / "config.pbtxt").write_text('backend: "<img src=x onerror=alert(1)>"\n')
    loaded = ("tiny_chat", "digits_onnx", "digits_versions_all", "identity", "mock", "broken")
    with running_server(root, model_control_mode="explicit", load_model=loaded) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=tool("chromium"), args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Opens pages. An error in one, a violation of its policy or a request to another host fails the test."""
    opened, problems, hosts = [], [], set()

    def open_(running: RunningServer, path: str = "models", width: int = 1200, **options: Any) -> Any:
        page = browser.new_page(viewport={"width": width, "height": 800}, **options)
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text) if line.type in ("error", "warning") else None)
        page.on("request", lambda request: hosts.add(request.url.split("/")[2] if "//" in request.url else ""))
        page.goto(f"http://{running.http_url}/console#/{path}")
        opened.append((page, running))
        return page

    yield open_
    for page, _ in opened:
        page.close()
    assert [problem for problem in problems if not STATUS.match(problem)] == []
    assert hosts <= {running.http_url for _, running in opened} | {""}


def test_models_show_their_state_and_why_one_failed(open_page: Any, served: RunningServer) -> None:
    page = open_page(served)
    assert page.locator("tr[data-model=digits_onnx]").get_by_text("Ready").is_visible()
    page.get_by_text("4 of 7 ready").or_(page.get_by_text("5 of 7 ready")).wait_for()
    reason = page.locator(".reason-box")
    assert "<img src=x onerror=alert(1)>" in reason.inner_text()
    page.get_by_label("Filter models").fill("BROK")
    assert page.locator("tr[data-model]").count() == 1


def test_a_model_is_loaded_and_unloaded(open_page: Any, served: RunningServer) -> None:
    page = open_page(served)
    row = page.locator("tr[data-model=idle]")
    page.get_by_label("Load idle").click()
    row.get_by_text("Ready").wait_for()
    page.get_by_label("Unload idle").click()
    page.get_by_role("dialog").get_by_role("button", name="Unload").click()
    row.get_by_text("Unloaded").wait_for()
    page.get_by_label("Load broken").click()
    page.get_by_role("status").get_by_text("unexpected").or_(page.locator(".toast.bad")).first.wait_for()


def test_the_form_asks_a_model_and_shows_the_request_as_code(open_page: Any, served: RunningServer) -> None:
    page = open_page(served, "models/identity")
    values = page.get_by_label("INPUT0", exact=True)
    values.fill("[[1.5, -2, 1e3]]")
    page.get_by_role("button", name="Run").click()
    page.get_by_label("Answer").get_by_text("[[1.5,-2,1000]]").wait_for()
    code = page.get_by_label("The request as code")
    assert '"data":[1.5,-2,1000]' in code.locator("pre").inner_text()
    code.get_by_role("button", name="Python (tritonclient)").click()
    assert 'InferInput("INPUT0", [1,3], "FP32")' in code.locator("pre").inner_text()
    values.fill("one, two")
    page.get_by_role("button", name="Run").click()
    assert page.get_by_role("alert").get_by_text("INPUT0: expected numbers").is_visible()


def test_the_code_of_a_request_runs(open_page: Any, served: RunningServer) -> None:
    page = open_page(served, "models/identity")
    page.get_by_label("INPUT0", exact=True).fill("[[1, 2]]")
    page.get_by_role("button", name="Run").click()
    page.get_by_label("Answer").get_by_text("[[1,2]]").wait_for()
    code = page.get_by_label("The request as code")
    code.get_by_role("button", name="Python (tritonclient)").click()
    printed: list[Any] = []
    exec(code.locator("pre").inner_text(), {"print": lambda *words: printed.append(words)})
    assert [(name, array.tolist()) for name, array in printed] == [("OUTPUT0", [[1.0, 2.0]])]


def test_a_picture_goes_in_and_classes_come_out(open_page: Any, served: RunningServer) -> None:
    page = open_page(served, "models/digits_onnx")
    page.set_input_files("input[type=file]", str(ROOT / "docs/images/digit-7-8x8.png"))
    page.get_by_label("What the model gets as image").wait_for()
    for scaling, best in (("0 to 1", "class 7"), ("1 to 0 (ink is 1, paper 0)", "class 2")):
        page.get_by_label("Scaling of image").select_option(label=scaling)
        page.get_by_role("button", name="Run").click()
        page.locator(".bars .name").first.get_by_text(best).wait_for()


def test_weights_divide_the_requests_between_versions(open_page: Any, served: RunningServer) -> None:
    page = open_page(served, "models/digits_versions_all?view=figures")
    for version, weight in (("1", "25"), ("3", "75")):
        page.get_by_label(f"Weight of version {version}").fill(weight)
    page.get_by_role("button", name="Set weights").click()
    page.get_by_text("version 1 answers 25 %").wait_for()
    page.get_by_role("button", name="Back to the highest version").click()
    page.get_by_text("The highest version, 3, answers").wait_for()


def test_the_config_is_shown_with_its_defaults(open_page: Any, served: RunningServer) -> None:
    page = open_page(served, "models/digits_onnx?view=config")
    assert '"default_model_filename": "model.onnx"' in page.locator("pre.code").inner_text()


def say(page: Any, text: str) -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")


def test_a_chat_with_its_history_and_probabilities(open_page: Any, served: RunningServer) -> None:
    page = open_page(served, "chat?model=tiny_chat")
    page.get_by_label("Temperature").fill("0")
    say(page, "What does math.sqrt do?")
    page.locator(".said").get_by_text("Return the square root of x.").wait_for()
    assert re.search(
        r"first token .* · \d+ tokens · [\d.]+ tokens/s · prompt 14 · stop", page.locator(".speed").last.inner_text()
    )
    page.get_by_label("Token probabilities").check()
    page.get_by_role("button", name="Regenerate").click()
    tokens = page.get_by_label("Tokens with probabilities")
    page.locator(".message.assistant .speed").get_by_text("stop").wait_for()
    assert page.locator(".message").count() == 2
    tokens.focus()
    page.keyboard.press("ArrowRight")
    assert re.match(r"“Return” \d+\.\d %", page.locator(".token-box b").inner_text())
    page.locator(".message.user").get_by_role("button", name="Edit").click()
    page.get_by_role("dialog").get_by_label("Message").fill("What does os.path.join do?")
    page.get_by_role("button", name="Send again").click()
    page.locator(".tokens").filter(has_text="Join two or more").wait_for()
    assert "math.sqrt" not in page.locator(".messages").inner_text()


def test_a_picture_goes_with_a_message(open_page: Any, served: RunningServer) -> None:
    page = open_page(served, "chat?model=mock")
    picture = {"name": "a.png", "mimeType": "image/png", "buffer": b"\x89PNG"}
    page.locator(".composer input[type=file]").set_input_files([picture, picture])
    page.get_by_role("button", name="Remove").first.click()
    say(page, "What is this?")
    page.get_by_text("'messages[0].content[0].image_url.url': the model 'mock' takes text only").wait_for()
    assert page.locator(".message.user img.attached").count() == 1
    assert page.locator(".talk > .row img").count() == 0
    # The message that the model could not take is not sent with the next one.
    say(page, "And in words?")
    page.locator(".message.assistant .said").last.get_by_text("And in words?").wait_for()


def test_answers_are_markdown_and_never_html(open_page: Any, served: RunningServer) -> None:
    page = open_page(served, "chat?model=mock")
    say(page, "**bold** `code` <img src=x onerror=alert(1)> [link](javascript:alert(1))\n- one\n- two")
    said = page.locator(".message.assistant .said")
    said.locator("li").nth(1).wait_for()
    assert (said.locator("strong").inner_text(), said.locator("code").inner_text()) == ("bold", "code")
    assert "<img src=x onerror=alert(1)>" in said.inner_text()
    assert (said.locator("img").count(), said.locator("a").count()) == (0, 0)


def test_a_long_answer_is_stopped(open_page: Any, served: RunningServer) -> None:
    page = open_page(served, "chat?model=mock")
    say(page, 'do: {"text": "one two three four five", "hang": 3}')
    page.locator(".message.assistant").get_by_text("one two three").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.locator(".speed").get_by_text("stopped").wait_for()
    assert page.get_by_role("button", name="Send").is_visible()


def test_a_request_that_fails_says_why(open_page: Any, served: RunningServer) -> None:
    page = open_page(served, "chat?model=tiny_chat")
    page.get_by_label("Longest answer").fill("100000")
    say(page, "Hello")
    assert "100000" in page.get_by_role("alert").inner_text()
    page.get_by_label("Tools (JSON)").fill("{")
    say(page, "Hello")
    page.get_by_text("The tools are not JSON").wait_for()


def test_two_models_answer_side_by_side(open_page: Any, served: RunningServer) -> None:
    page = open_page(served, "chat?model=tiny_chat")
    page.get_by_role("button", name="Compare").click()
    panes = page.locator(".pane")
    assert {panes.nth(index).get_by_label("Model").input_value() for index in (0, 1)} == {"tiny_chat", "mock"}
    say(page, "What does math.sqrt do?")
    for index in (0, 1):
        panes.nth(index).get_by_text(" tokens/s").wait_for()


def test_a_traced_request_has_a_timeline(open_page: Any, served: RunningServer) -> None:
    page = open_page(served, "traces")
    page.get_by_role("button", name="Start tracing").click()
    page.get_by_role("button", name="Stop tracing").wait_for()
    other = open_page(served, "models/identity")
    other.get_by_role("button", name="Run").click()
    other.get_by_label("Answer").get_by_text("OUTPUT0").wait_for()
    page.get_by_role("option").filter(has_text="identity").first.click()
    timeline = page.get_by_label("Timeline")
    assert timeline.get_by_text("compute", exact=True).is_visible()
    page.get_by_role("button", name="Stop tracing").click()
    page.get_by_role("button", name="Start tracing").wait_for()


def test_the_log_is_followed(open_page: Any, served: RunningServer) -> None:
    page = open_page(served, "logs")
    log = page.get_by_label("Log", exact=True)
    tail = served.server.controlplane.logs.tail
    tail.add("2026-11-26 06:24:51.560 INFO    app.server: it began")
    log.get_by_text("it began").wait_for()
    tail.add("2026-11-26 06:24:52.560 ERROR   app.server: <b>it ended</b>")
    log.get_by_text("<b>it ended</b>").wait_for()
    page.get_by_label("Level").select_option("3")
    log.get_by_text("it began").wait_for(state="hidden")
    assert log.get_by_text("<b>it ended</b>").is_visible()


def test_charts_follow_the_requests(open_page: Any, served: RunningServer) -> None:
    page = open_page(served, "charts")
    page.get_by_role("img", name=re.compile(r"Requests per second: all \d")).wait_for()
    page.get_by_role("img", name=re.compile(r"KV cache in use: tiny_chat \d")).wait_for()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_fits_a_telephone(open_page: Any, served: RunningServer, theme: str) -> None:
    page = open_page(served, width=360, color_scheme=theme)
    for path in PAGES:
        page.goto(f"http://{served.http_url}/console#/{path}")
        page.get_by_role("heading", level=1).wait_for()
        page.locator("main .card, main table, .talk, .log, .empty").filter(visible=True).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, path
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 21, 20)"
    assert dark == (theme == "dark")


def test_the_keyboard_is_enough(open_page: Any, served: RunningServer) -> None:
    page = open_page(served)
    page.get_by_label("Filter models").focus()
    page.keyboard.type("identity")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the model's link
    page.get_by_role("tab", name="Try it").wait_for()
    page.get_by_role("tab", name="Try it").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_role("tab", name="Figures", selected=True).wait_for()
    page.keyboard.press("ArrowLeft")
    values = page.get_by_label("INPUT0", exact=True)
    values.wait_for()
    for _ in range(3):
        page.keyboard.press("Tab")
        if values.evaluate("element => element === document.activeElement"):
            break
    page.keyboard.press("Control+A")
    page.keyboard.type("[[7]]")
    page.keyboard.press("Control+Enter")
    page.get_by_label("Answer").get_by_text("[[7]]").wait_for()
    names = page.evaluate(
        "[...document.querySelectorAll('button, input, select, textarea, a')].filter(each => each.offsetParent)"
        ".filter(each => !(each.ariaLabel || each.textContent.trim() || each.closest('label')?.textContent)).length"
    )
    assert names == 0, "controls without an accessible name"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    file = KeyFile(tmp_path_factory.mktemp("keys") / "keys.yaml")
    file.add("everything", *SCOPES)
    file.add("user", Scope.INFER)
    return file


@pytest.fixture(scope="module")
def guarded(keys: KeyFile, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("guarded")
    write_identity(root)
    with running_server(root, api_keys_file=str(keys.path)) as running:
        yield running


def test_a_server_with_keys_asks_for_one_and_the_page_keeps_it_in_memory(
    open_page: Any, guarded: RunningServer, keys: KeyFile
) -> None:
    page = open_page(guarded)
    page.get_by_label("API key", exact=True).last.fill("msk_wrong")
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("The server refused the key").wait_for()
    page.get_by_label("API key", exact=True).last.fill(keys.texts["everything"])
    page.keyboard.press("Enter")
    page.locator("tr[data-model=identity]").get_by_text("Ready").wait_for()
    stored = page.evaluate("JSON.stringify([localStorage, sessionStorage, location.href, document.cookie])")
    assert keys.texts["everything"] not in stored
    page.reload()
    page.get_by_role("dialog", name="API key").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("Key needed").wait_for()


def test_a_key_for_inference_alone_tries_models_and_sees_no_figures(
    open_page: Any, guarded: RunningServer, keys: KeyFile
) -> None:
    page = open_page(guarded)
    page.get_by_label("API key", exact=True).last.fill(keys.texts["user"])
    page.keyboard.press("Enter")
    page.get_by_text("This key may not read figures.").wait_for()
    page.get_by_role("link", name="identity").click()
    page.get_by_role("button", name="Run").click()
    page.get_by_label("Answer").get_by_text("OUTPUT0").wait_for()
    page.get_by_role("tab", name="Figures").click()
    page.get_by_text("No figures").wait_for()
