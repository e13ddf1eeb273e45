"""Makes the pictures of docs/console.md: `python docs/console_pictures.py [NAME ...]`.

It needs Chromium, playwright and pillow. It serves model_repository/, sends the models some requests, and opens each
page of the console as a person would.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright
from screens import PORTS, ROOT, serving

IMAGES = ROOT / "docs" / "images" / "console"
BASE = f"http://localhost:{PORTS['http']}"
PICTURE = ROOT / "docs" / "images" / "digit-7.png"
_SIZE = {"width": 1120, "height": 720}
_SCALE = 1.5
_COLOURS = 160
_MODELS_TIME_MS, _CHART_TIME_MS = 8_000, 45_000
_ADD = {
    "inputs": [
        {"name": f"INPUT{number}", "shape": [4], "datatype": "FP32", "data": [1, 2, 3, 4]} for number in range(2)
    ]
}
_CHAT = {"model": "tiny_chat", "max_tokens": 40, "messages": [{"role": "user", "content": "What does math.sqrt do?"}]}


@contextmanager
def traffic() -> Iterator[None]:
    """Requests to several models until the end of the block."""
    ends = threading.Event()

    def send() -> None:
        with httpx.Client(base_url=BASE, timeout=60) as client:
            number = 0
            while not ends.wait(0.03 + 0.02 * (number % 7)):
                number += 1
                client.post("/v2/models/add_sub/infer", json=_ADD)
                headers = {"Inference-Header-Content-Length": "0"}
                client.post("/v2/models/digits_pipeline/infer", content=PICTURE.read_bytes(), headers=headers)
                if number % 5 == 0:
                    client.post("/v1/chat/completions", json=_CHAT)

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def models(page: Any) -> None:
    httpx.get(f"{BASE}/v2/models/digits_tensorrt", timeout=60)  # fails without a GPU, and says why
    page.locator(".reason-box").wait_for()
    page.wait_for_timeout(_MODELS_TIME_MS)


def playground(page: Any) -> None:
    page.set_input_files("input[type=file]", str(PICTURE))
    page.get_by_label("What the model gets as image").wait_for()
    page.get_by_role("button", name="Run").click()
    page.locator(".bars").wait_for()


def chat(page: Any) -> None:
    page.get_by_label("Temperature").fill("1")
    page.get_by_label("Seed").fill("3")
    for question, shows in (("What does os.path.join do?", False), ("What does asyncio.run do?", True)):
        page.get_by_label("Token probabilities").set_checked(shows)
        page.get_by_role("textbox", name="Message").fill(question)
        page.keyboard.press("Enter")
        page.locator(".speed").last.get_by_text("stop").wait_for()
    doubts = [int(each) for each in re.findall(r"--doubt: (\d+)", page.locator(".tokens").inner_html())]
    page.locator(".token").nth(doubts.index(max(doubts))).hover()


def charts(page: Any) -> None:
    page.wait_for_timeout(_CHART_TIME_MS)


def traces(page: Any) -> None:
    page.get_by_label("How many requests").select_option("1")
    page.get_by_role("button", name="Start tracing").click()
    page.get_by_role("option").filter(has_text="digits_pipeline").first.click()
    page.get_by_role("button", name="Stop tracing").click()
    page.get_by_role("button", name="Start tracing").wait_for()


def logs(page: Any) -> None:
    page.get_by_label("Filter lines").fill("loaded")  # other lines name paths of this machine
    page.get_by_label("Log", exact=True).get_by_text("successfully loaded 'digits_pipeline'").wait_for()


# The name of the picture, the page's address, the theme, the steps.
PAGES = (
    ("models", "models", "light", models),
    ("playground", "models/digits_torchscript", "light", playground),
    ("chat", "chat?model=tiny_chat", "light", chat),
    ("charts", "charts", "dark", charts),
    ("logs", "logs", "light", logs),
    ("traces", "traces", "dark", traces),
)


def save(data: bytes, path: Path) -> None:
    """A PNG with few colours, which is a third as large."""
    small = Image.open(io.BytesIO(data)).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "MODELSERVER_URL": f"localhost:{PORTS['http']}"}
    with serving(env), traffic(), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, address, theme, steps in PAGES:
            if sys.argv[1:] and name not in sys.argv[1:]:
                continue
            page = browser.new_page(viewport=_SIZE, color_scheme=theme, device_scale_factor=_SCALE)
            page.goto(f"{BASE}/console#/{address}")
            page.get_by_role("heading", level=1).wait_for()
            steps(page)
            save(page.screenshot(), IMAGES / f"{name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
